"""study.toml: a base job, the axes of a study, and the runs that follow from them.

[study]
dir = "runs/scaling"
tokens_per_parameter = [5.0, 10.0, 20.0]
[base.data.sources.text]         # a job, here or in a file: study.job = "job.toml"
name = "builtin"
[sizes.small]                    # keys of [model], or path = "model.toml"
dim = 16
[optimizers.adamw]               # keys of [optimizer]
lr = 1e-2
[schedules.wsd]                  # keys of [schedule]
name = "wsd"
"""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import tomlkit
from torch import nn

from forge_core import flops_per_token, parameter_count
from forge_lab._shared.paths import expand_fields, user_path
from forge_lab._shared.problems import Problem, invalid, problems_of, raise_problems
from forge_lab._shared.toml_files import read_toml
from forge_lab.study.queue import PlannedRun, check_all
from forge_train import Layers, read_layers, resolve
from forge_train.errors import ConfigError, refuse
from forge_train.toolkit import Course, build_trained, structure_table

#: Tables of names, and the section of a job whose keys an entry holds.
AXES = {"sizes": "model", "optimizers": "optimizer", "schedules": "schedule"}
_ALL_KEPT = 10**6
_KEEP = ["weights", "optimizer", "cursor"]


@dataclass(frozen=True)
class StudyConfig:
    """The table [study]."""

    dir: str = field(metadata={"path": True})
    """folder of the study"""
    tokens_per_parameter: tuple[float, ...]
    """budgets: tokens of a run as a multiple of its parameters"""
    job: str | None = None
    """file of the base job, next to this one; keys of [base] replace its keys"""
    seeds: tuple[int, ...] = (0,)
    """values of run.seed"""
    parameters: Literal["all", "non_embedding"] = "all"
    """parameters that N counts, in budgets and in the fit; non_embedding: without embedding and head"""
    trunk: bool = True
    """the budgets of a size are decays of one trunk at a constant rate; else each run is trained from its
    beginning"""
    threads: int = 1
    """threads of each run on this machine"""
    resamples: int = 200
    """resampled studies for the intervals of the fit"""
    level: float = 0.95
    """fraction of them that an interval contains"""

    def __post_init__(self) -> None:
        expand_fields(self)
        raise_problems("", self._problems())

    def _problems(self) -> Iterator[Problem]:
        budgets, seeds = list(self.tokens_per_parameter), list(self.seeds)
        if not self.dir.strip():
            yield Problem("dir", "missing", self.dir, "must name a folder", "use 'runs/scaling'")
        # names of runs have six digits of the budget
        if not budgets or min(budgets) <= 0 or len({f"{b:g}" for b in budgets}) < len(budgets):
            rule = "must be one number or more, all above 0 and different in six digits"
            yield Problem("tokens_per_parameter", "range", budgets, rule, "use [5.0, 10.0]")
        if not seeds or len(set(seeds)) < len(seeds):
            rule = "must be one or more, all different"
            yield Problem("seeds", "duplicate", seeds, rule, "use [0]")
        for name, value in (("threads", self.threads), ("resamples", self.resamples)):
            if not 1 <= value <= 10**6:
                yield Problem(name, "range", value, "must be 1 to 10**6", f"use {max(value, 1)}")
        if not 0 < self.level < 1:
            yield Problem("level", "range", self.level, "must be between 0 and 1", "use 0.95")


class Variant(NamedTuple):
    """The entries of a run, "" on an axis that the study does not vary, and its seed."""

    size: str
    optimizer: str
    schedule: str
    seed: int

    def name(self, last: str) -> str:
        """The name of a run, which is that of its folder."""
        words = (self.size, self.optimizer, self.schedule, f"seed{self.seed}", last)
        return "-".join(filter(None, words))


@dataclass(frozen=True, kw_only=True)
class StudyRun(PlannedRun):
    """A run of a study: its variant, and its cost in tokens and operations; a trunk has no budget.

    `parameters` counts those that study.parameters names; `tokens` include the steps that the parent has trained.
    """

    size: str
    optimizer: str
    schedule: str
    seed: int
    budget: float | None
    parameters: int
    tokens: int


@dataclass(frozen=True)
class Study:
    """A study and its runs, trunks first."""

    name: str
    config: StudyConfig
    runs: tuple[StudyRun, ...]

    @property
    def dir(self) -> Path:
        return Path(self.config.dir).absolute()


def read_study(path: Path) -> Study:
    """Read the study of a file; nothing is started or written. ConfigError or DataError with all problems."""
    try:
        table = read_toml(path)
    except ValueError as error:
        raise ConfigError(problems_of(error), str(path)) from error

    known = ("study", "base", *AXES)
    rule, fix = "is not a table of a study", f"use {', '.join(known)}"
    problems: list[Any] = [
        Problem(key, "unknown_key", ..., rule, fix) for key in table if key not in known
    ]
    config, found = structure_table(table.get("study", {}), StudyConfig, "study")
    problems += found
    for axis in AXES:
        problems += _axis_problems(axis, table.get(axis, {}))
    if "sizes" not in table:
        fix = "add [sizes.small] with keys of [model], such as dim"
        problems.append(Problem("sizes", "missing", ..., "are missing", fix))
    refuse(problems)

    base = _base(path, config, table.get("base", {}))
    sizes, optimizers, schedules = (_entries(path, axis, table.get(axis, {})) for axis in AXES)
    groups = check_all(
        itertools.product(sizes, optimizers, config.seeds),
        lambda of: _group(config, base, of[0], of[1], schedules, of[2]),
    )
    runs = [run for group in groups for run in group]
    runs.sort(key=lambda run: run.parent is not None)  # stable: trunks first
    return Study(Path(config.dir).name, config, tuple(runs))


_Entry = tuple[str, Layers]


def _axis_problems(axis: str, table: Any) -> Iterator[Problem]:
    if not isinstance(table, dict) or not all(isinstance(entry, dict) for entry in table.values()):
        fix = f"write [{axis}.NAME] and keys of [{AXES[axis]}]"
        yield Problem(axis, "type", table, "must be a table of tables", fix)
        return
    rule = "must be at most 40 letters, digits and underscores"
    for name in table:
        if not re.fullmatch(r"\w{1,40}", name, re.ASCII):
            yield Problem(axis, "name", name, rule, "rename it")


def _base(path: Path, config: StudyConfig, table: Any) -> Layers:
    layers = Layers() if config.job is None else read_layers(path.parent / user_path(config.job))
    if not isinstance(table, dict):
        fix = "write [base.train] and the like"
        raise invalid("base", "type", table, "must be a table", fix, kind=ConfigError)
    layers.add(table, f"base of {path}")

    given = [f"train.{key}" for key in ("steps", "tokens", "tokens_per_parameter")]
    rule, fix = "is given by the study", "leave it out of the base"
    problems = [
        Problem(key, "excludes", layers.at(key), rule, fix)
        for key in (*given, "run.dir", "run.seed", "init.from")
        if key in layers.origins
    ]

    if layers.at("eval.every_steps") == 0:
        rule = "measures nothing to fit"
        problems.append(Problem("eval.every_steps", "range", 0, rule, "leave it out"))
    if layers.at("data.phases"):
        rule = "are not part of a study, whose budgets they would mix"
        problems.append(Problem("data.phases", "unsupported", ..., rule, "leave them out"))
    refuse(problems)
    return layers


def _entries(path: Path, axis: str, table: Mapping[str, Any]) -> list[_Entry]:
    """(name, layers of a job) of each entry; one without a name where the axis is not varied."""
    found = []
    for name, entry in (table or {"": {}}).items():
        layers, keys = Layers(), dict(entry)
        if axis == "sizes" and "path" in keys:
            file = path.parent / str(keys.pop("path"))
            read = read_layers(file)
            if "model" not in read.values:
                key, fix = f"{axis}.{name}.path", "name a file that has one"
                raise invalid(key, "model", str(file), "has no [model]", fix, kind=ConfigError)
            layers.add({"model": read.values["model"]}, f"{axis}.{name}")
        layers.add({AXES[axis]: keys}, f"{axis}.{name}")
        found.append((name, layers))
    return found


def _group(
    config: StudyConfig,
    base: Layers,
    size: _Entry,
    optimizer: _Entry,
    schedules: list[_Entry],
    seed: int,
) -> list[StudyRun]:
    """The runs of a size, an optimizer and a seed: all budgets under all schedules, and their trunk."""
    runs, warmups = list[StudyRun](), set[int]()
    for schedule in schedules:
        layers = copy.deepcopy(base)
        for name, over in (size, optimizer, schedule):
            layers.add(over.values, over.origins[next(iter(over.origins))] if name else "base")
        layers.set("run.seed", seed, "study.seeds")
        variant = Variant(size[0], optimizer[0], schedule[0], seed)

        for budget in sorted(config.tokens_per_parameter):
            run = _with_budget(config, layers, variant, budget)
            if runs and runs[-1].schedule == run.schedule and runs[-1].steps == run.steps:
                rule = f"gives {runs[-1].name} and {run.name} {run.steps} steps each"
                key, fix = "study.tokens_per_parameter", "use budgets that differ more"
                raise invalid(key, "duplicate", budget, rule, fix, kind=ConfigError)
            runs.append(run)
        warmups.add(runs[-1].job.config.schedule.warmup_steps)
    if not config.trunk:
        return runs

    if len(warmups) > 1:
        key, rule = "schedule.warmup_steps", "must be one number in the schedules of one trunk"
        fix = "set study.trunk = false"
        raise invalid(key, "trunk", sorted(warmups), rule, fix, kind=ConfigError)
    variant = variant._replace(schedule="")
    forks = [_forked(config, run, variant.name("trunk")) for run in runs]
    begins = sorted({fork.begin for fork in forks})
    layers = copy.deepcopy(layers)
    layers.set("schedule.name", "constant", "trunk")
    layers.set("checkpoint.keep_last", _ALL_KEPT, "trunk")
    save = {"name": "forge_train.study.trunk:SaveAt", "options": {"steps": begins}}
    layers.add({"callbacks": {"save_at": save}}, "trunk")
    return [_run(config, layers, variant, None, "trunk", begins[-1]), *forks]


def _with_budget(config: StudyConfig, layers: Layers, variant: Variant, budget: float) -> StudyRun:
    """The run of a budget, from its first step."""
    layers = copy.deepcopy(layers)
    layers.set("train.steps", 10**9, "study.tokens_per_parameter")  # long enough for any schedule
    job = resolve(layers).config
    tokens = math.ceil(budget * count_parameters(build_trained(job), config.parameters))
    return _run(config, layers, variant, budget, f"x{budget:g}", Course(job).steps_of(tokens))


def _run(
    config: StudyConfig,
    layers: Layers,
    variant: Variant,
    budget: float | None,
    last: str,
    steps: int,
) -> StudyRun:
    """A run of `steps` steps whose name ends in `last`."""
    layers, name = copy.deepcopy(layers), variant.name(last)
    layers.set("train.steps", steps, "study.tokens_per_parameter")
    layers.set("run.dir", str(Path(config.dir).absolute() / "runs" / name), "study.dir")
    try:
        job = resolve(layers)
    except ConfigError as error:  # about the length: other problems were found before
        found = [replace(p, origin=f"{p.origin} {name}".lstrip()) for p in error.problems]
        raise ConfigError(found) from error

    model = build_trained(job.config)
    _, before, own = Course(job.config).at_step(steps)
    tokens = before + own
    flops = tokens * flops_per_token(model, job.config.data.seq_len)
    parameters, toml = count_parameters(model, config.parameters), job.to_toml(given=True)
    return StudyRun(
        **variant._asdict(), name=name, steps=steps, toml=toml, job=job, budget=budget,
        parameters=parameters, tokens=tokens, flops=flops,
    )  # fmt: skip


def _forked(config: StudyConfig, run: StudyRun, trunk: str) -> StudyRun:
    """The run as a fork of a trunk that trains only the decay: the same bits, and fewer steps."""
    schedule = run.job.config.schedule
    if schedule.name != "wsd":
        rule = f"must have a constant rate for the trunk of {run.name}"
        fix = "use wsd, or set study.trunk = false"
        raise invalid("schedule.name", "trunk", schedule.name, rule, fix, kind=ConfigError)

    own = schedule.wsd
    decay = own.decay_steps or max(1, round(own.decay_fraction * run.steps))
    begin = run.steps - decay
    if begin <= schedule.warmup_steps:
        rule = f"must be below {begin}, the steps of {run.name} before its decay: {run.steps} less {decay}"
        key, fix = "schedule.warmup_steps", "use larger budgets or fewer warmup_steps"
        raise invalid(key, "decay", schedule.warmup_steps, rule, fix, kind=ConfigError)

    source = Path(config.dir).absolute() / "runs" / trunk
    toml = f"{run.toml}\n[init]\nfrom = {tomlkit.item(f'{source}@{begin}').as_string()}\nkeep = {_KEEP}\n"
    return replace(run, parent=trunk, begin=begin, toml=toml)


def count_parameters(model: nn.Module, what: str) -> int:
    """Count all parameters, or with another `what` those outside of embeddings and the head over the vocabulary."""
    total = parameter_count(model)
    if what == "all":
        return total
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    tables += [head for head in [getattr(model, "lm_head", None)] if head is not None]
    outside = {p for table in tables for p in table.parameters()}
    return total - sum(p.numel() for p in outside)
