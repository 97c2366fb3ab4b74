"""A run that begins in the state of another one: what it takes is found and compared first, and loaded together."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from forge_ckpt import (
    CorruptCheckpoint,
    SavedTensors,
    WeightsReport,
    load_step,
    load_weights,
    match_weights,
)
from forge_ckpt.frozen_base import frozen_weights
from forge_ckpt.hf import fill_part, notes_of
from forge_ckpt.weights import first_names
from forge_core.lora import adapter_names
from forge_data import InvalidData, Loader
from forge_train._shared.problems import Problem, invalid
from forge_train.build.begin_tokens import begin_problems
from forge_train.build.hf_models import HFModel, read_model
from forge_train.build.resolve import ResolvedJob
from forge_train.build.run_directory import OPTIMIZER_KEYS, RunDirectory, is_fixed
from forge_train.config.init import (
    FILES,
    NAME,
    InitConfig,
    Source,
    find_source,
    has_begun,
    source_problems,
)
from forge_train.config.model import BuiltInModelConfig, VLMModelConfig
from forge_train.errors import (
    ConfigError,
    DataError,
    JobError,
    StateError,
    problems_at,
    refuse,
    run_on_all_ranks,
    write_errors,
)
from forge_train.run.checkpoints import Check
from forge_train.run.run import Run
from forge_vlm.fusion import PARTING

#: The objects of a checkpoint that a run goes on with, beside weights and moments; each callback has one, too.
_CURSOR = ("loader", "progress", "rng")
#: How names of objects end that an optimizer with an average of the weights saves.
_UPDATES_OF_AVERAGE = ".ema_updates"


@dataclass(frozen=True)
class Fork:
    """The source of a run's initial state, which was compared with the job; nothing of it is loaded yet.

    `weights` names the tensors of the whole model. `saved` are the names of the source's objects. `changed` is
    {key: [value of the parent, value here]}, empty where no configuration of the parent is known. `ignored` are
    tensors of a folder of Hugging Face that transformers does not load either. `base` holds the frozen weights of a
    parent with adapters, `model_toml` the [model] of an imported parent, if it is that of the job.
    """

    init: InitConfig
    source: Source
    weights: WeightsReport
    step: int | None = None
    digest: str | None = None
    saved: Collection[str] = ()
    changed: Mapping[str, list[Any]] | None = None
    model_toml: Path | None = None
    hf: HFModel | None = None
    ignored: Sequence[str] = ()
    base: Path | None = None

    def load(self, run: Run, state: Mapping[str, Any], check: Check) -> None:
        """Fill the part of a run's `state` that is kept. Collective.

        Of a checkpoint each rank reads what its own shards touch, and every rank verifies before a tensor of any rank
        changes. Of a folder of Hugging Face, which has no digests, it reads whole tensors, one at a time.
        """
        hf, model = self.hf, run.model
        if hf is not None:
            run_on_all_ranks(run.agreement, lambda: self._fill(model, hf))
            return
        # that of rank 0 is read by all: the parent may have saved since another rank looked
        path, group = self.source.path, run.meshes.host_group
        names = [*self.weights.copied, *self.weights.fresh]
        with _source_errors(self.init, path):
            if self.base is not None:
                load_weights(self.base, model, names=names, group=group)
            if "optimizer" not in self.init.keep:
                load_weights(path, model, self.init.patterns or ("*",), names=names, group=group)
                return
            # callbacks that the parent did not have begin
            rest = (*_CURSOR, *self.saved) if "cursor" in self.init.keep else ()
            taken = ("model", "optimizer", *rest)
            wanted = {name: value for name, value in state.items() if name in taken}
            load_step(path, wanted, check if rest else None, group=group)

    def _fill(self, model: nn.Module, hf: HFModel) -> None:
        with _source_errors(self.init, self.source.path):
            fill_part(model, hf.tensors().read, {name: name for name in self.weights.copied})

    def write(self, run_dir: Path) -> None:
        """Write the files that came with weights from Hugging Face, so that an export gives them back: those of the
        folder, or those that the parent has of it. JobError where the disk refuses."""
        inherited = None if self.source.run is None else self.source.run / FILES
        rule = f"cannot hold the files of {self.source.path}"
        with write_errors("run.dir", run_dir, "make room there", JobError, rule):
            if self.hf is not None:
                self.hf.write(run_dir, self.hf.files())
            elif inherited is not None and inherited.is_dir() and not self.init.patterns:
                shutil.copytree(inherited, run_dir / FILES, dirs_exist_ok=True)
            if self.model_toml is not None:  # later lives get their [model] here
                shutil.copyfile(self.model_toml, run_dir / NAME)

    def parent(self) -> dict[str, Any]:
        """Where the state is from, and what was taken, as plain data for parent.json."""
        run = self.source.run
        return {
            "run_dir": None if run is None else str(run.absolute()),
            "checkpoint": str(self.source.path.absolute()),
            "step": self.step,
            "digest": self.digest,
            "keep": list(self.init.keep),
            "patterns": list(self.init.patterns),
            **vars(self.weights),
            "changed": dict(self.changed or {}),
        }

    def event(self) -> dict[str, Any]:
        """Fields of the event `fork`: `parent` with numbers of tensors in place of their names."""
        fields = self.parent() | {name: len(names) for name, names in vars(self.weights).items()}
        return {"of_step" if key == "step" else key: value for key, value in fields.items()}

    def lines(self) -> list[str]:
        """What a person should know of it, without the names of all tensors."""
        lines = [f"{' + '.join(self.init.keep)} of {self.source.path}: {self.weights}"]
        if self.hf is not None:
            lines += notes_of(self.hf, self.ignored)
        for key, (before, now) in (self.changed or {}).items():
            if key.startswith(("model.", "lora.")):
                lines.append(f"{key} was {before!r} there and is {now!r} here")
        return lines


def find_fork(job: ResolvedJob, model: nn.Module, loader: Loader, total_steps: int) -> Fork | None:
    """The fork that a run begins as; None for one that begins fresh, or has begun and goes on where it stands.

    `model` is the whole one, on the meta device or not. Reads the manifest of the source and the configuration
    next to it, takes no lock. Raises ConfigError, DataError (the data is not the parent's) or StateError (the source
    is damaged) before anything is started.
    """
    init, run_dir = job.config.init, Path(job.config.run.dir)
    if init.from_ is None or has_begun(run_dir):
        return None
    refuse(source_problems(init.from_, run_dir))
    source = find_source(init.from_)
    if init.vocab_size is not None and not source.is_hf:
        rule = f"adds rows to a folder of Hugging Face, and {init.from_} is a run"
        fix = "leave it out, or begin from what forge-train export wrote of it"
        raise invalid("init.vocab_size", "source", init.vocab_size, rule, fix, kind=ConfigError)

    here = {n: t for n, t in model.state_dict().items() if isinstance(t, Tensor)}
    adapters = adapter_names(model)
    without = {n: t for n, t in here.items() if n not in adapters}
    if source.is_hf:
        return _of_hf(init, source, without)
    with _source_errors(init, source.path), SavedTensors(source.path) as saved:
        objects, there = saved.keys(), saved.below("model")
        refuse(_missing(init, source, objects))
        changed = _changes(job, source)
        averaged = any(name.endswith(_UPDATES_OF_AVERAGE) for name in saved.table.objects)
        refuse([*_other_parts(init, source, changed), *_other_average(job, source, averaged)])

        base, taken = None, without
        if "base" in objects:
            base, taken = _base(init, source, bool(adapters)), here
            there |= frozen_weights(base, saved.read_object("base")["digest"])
        if changed.get("model.name") == ["transformer", "vlm"] and not init.patterns:
            weights = _match_text(job, taken, there, changed)
        else:
            weights = _match(init, taken, there, source, changed)

        if "cursor" in init.keep:
            if source.run is not None:
                refuse(begin_problems(job, RunDirectory(source.run)))
            loader.load_checks(saved.read_object("loader"))
            if saved.step is None or saved.step >= total_steps:
                rule = f"must be above {saved.step}, the step of init.from {init.from_!r}, where a run goes on that keeps the cursor"
                fix = "train longer, or name an earlier checkpoint"
                raise invalid("train.steps", "range", total_steps, rule, fix, kind=ConfigError)
        # the file of an import that the job has its [model] from
        path = None if source.run is None else source.run / NAME
        of_model = path if job.origin("model.dim") == f"import {path}" else None
        return Fork(
            init, source, weights, saved.step, saved.digest, objects, changed, of_model, base=base
        )


def _of_hf(init: InitConfig, source: Source, here: Mapping[str, Tensor]) -> Fork:
    if init.keep != ("weights",):
        rule, fix = "must be ['weights']: a folder of Hugging Face has only weights", "use that"
        raise invalid("init.keep", "weights", list(init.keep), rule, fix, kind=ConfigError)
    hf = read_model(source.path, init.vocab_size)
    tensors = hf.tensors()
    weights = _match(init, here, tensors.meta, source, {})
    hf.files()
    return Fork(init, source, weights, hf=hf, ignored=tensors.ignored)


def _base(init: InitConfig, source: Source, trains: bool) -> Path:
    """The frozen weights of a parent with adapters, which the run must have as well."""
    name = init.from_
    if not trains:
        rule = "has adapters, and lora.rank is 0 here"
        fix = "write the model with forge-train export and begin from that folder, or set lora.rank"
        raise invalid("init.from", "adapters", name, rule, fix, kind=ConfigError)
    if init.patterns:
        rule = (
            f"take a part of the weights, and init.from {name!r} has adapters, which belong to all"
        )
        key, fix = "init.patterns", "leave init.patterns out"
        raise invalid(key, "adapters", list(init.patterns), rule, fix, kind=ConfigError)

    if source.run is None:
        rule = "has only adapters, and their frozen weights are those of its run"
        fix = "name the run, as RUN@STEP"
        raise invalid("init.from", "base", name, rule, fix, kind=ConfigError)
    return RunDirectory(source.run).base


def _match(
    init: InitConfig,
    here: Mapping[str, Tensor],
    there: Mapping[str, Tensor],
    source: Source,
    changed: Mapping[str, list[Any]],
) -> WeightsReport:
    """What is taken; without patterns all that is here and all that is there.

    ConfigError else: with the keys of [model] or [lora] that differ from the parent's, or with tensors where none does.
    """
    try:
        report = match_weights(here, there, init.patterns or ("*",))
    except ValueError as error:
        found = problems_at(error, f"init.from {init.from_!r}")
        problems = [p.under("init") if p.key == "patterns" else p for p in found]
    else:
        if init.patterns or not report.difference:
            return report
        rule = f"is of another model: {report.difference}"
        fix = _EXPORTED if any(name.endswith(".lora_a") for name in there) else _BOTH
        fix = f"build the same model, or {fix}"
        problems = [Problem("init.from", "model", init.from_, rule, fix)]
    # the keys that differ say more than the tensors; of adapters all are taken
    for table, otherwise in (
        ("model.", "name those that fit in init.patterns"),
        ("lora.", _EXPORTED),
    ):
        keys = [key for key in changed if key.startswith(table) and is_fixed(key)]
        if keys and not init.patterns:
            rule = f"was another in {source.run}, and init.from takes all weights"
            raise ConfigError(_changed(keys, changed, rule, f"set it back, or {otherwise}"))
    raise ConfigError(problems)


_BOTH = "init.patterns = ['*'] takes the weights that both have"
_EXPORTED = "begin from a folder that forge-train export wrote of the parent"


def _changed(
    keys: Sequence[str], changed: Mapping[str, list[Any]], rule: str, fix: str
) -> list[Problem]:
    values = [(key, *changed[key]) for key in keys]
    return [Problem(k, "changed", now, f"{rule}: {before!r}", fix) for k, before, now in values]


#: Keys of [model] that a text model does not have.
_OF_IMAGES = {f.name for f in fields(VLMModelConfig)} - {f.name for f in fields(BuiltInModelConfig)}


def _match_text(
    job: ResolvedJob,
    here: Mapping[str, Tensor],
    there: Mapping[str, Tensor],
    changed: Mapping[str, list[Any]],
) -> WeightsReport:
    """What a model with images takes of a text model: all of it. What the text model has not begins fresh.

    ConfigError for a text model of other keys, for weights that nothing would use, and for fusions whose parts begin
    as copies of text's.
    """
    init, fusion = job.config.init, job.config.model.fusion.name  # type: ignore[union-attr]
    name = f"init.from {init.from_!r}"
    keys = [k for k in changed if k.startswith("model.") and is_fixed(k) and k != "model.name"]
    keys = [k for k in keys if k.split(".")[1] not in _OF_IMAGES]
    rule = f"was another in the text model of {name}"
    fix = "set it back, or name those that fit in init.patterns"
    problems = _changed(keys, changed, rule, fix)

    if fusion in PARTING:
        rule = f"has parts that begin as copies of the text model's, and {name} makes none"
        fix = "use forge_vlm.warm_start.warm_start on a full model, or init.patterns = ['*'] for fresh ones"
        problems.append(Problem("model.fusion.name", "initial", fusion, rule, fix))

    try:
        report = match_weights(here, there, ("*",))
    except ValueError as error:
        problems += problems_at(error, name)
    else:
        if report.unused:
            rule = f"has weights of text that nothing here would use: {first_names(report.unused)}"
            fix = f"build the same text model, or {_BOTH}"
            problems.append(Problem("init.from", "unused", init.from_, rule, fix))
    refuse(problems)
    return report


def _missing(init: InitConfig, source: Source, saved: Sequence[str]) -> list[Problem]:
    """A problem of objects that are kept and were not saved: an import has weights alone."""
    wanted = {"weights": ("model",), "optimizer": ("optimizer",), "cursor": _CURSOR}
    missing = [name for kind in init.keep for name in wanted[kind] if name not in saved]
    rule = f"needs {', '.join(missing)}, and {source.path} has only {', '.join(saved)}"
    fix = "keep less, or name another checkpoint"
    return [Problem("init.keep", "missing", list(init.keep), rule, fix)] if missing else []


def _changes(job: ResolvedJob, source: Source) -> dict[str, list[Any]]:
    """{key: [value of the parent, value here]} of all keys but the folder and [init]; of an import its [model]."""
    if source.run is None:
        return {}
    paths = RunDirectory(source.run)
    found = paths.changes(job) if paths.config.exists() else paths.changes_of_import(job)
    return {k: v for k, v in found.items() if k != "run.dir" and not k.startswith("init.")}


def _other_parts(
    init: InitConfig, source: Source, changed: Mapping[str, list[Any]]
) -> list[Problem]:
    """Problems of keys that give what is kept another meaning."""
    if "optimizer" not in init.keep:
        return []
    goes_on = "cursor" in init.keep
    keys = [
        k
        for k in changed
        if k in OPTIMIZER_KEYS
        # moments of other multipliers of the output are of gradients of another size
        or k.startswith(("lora.", "model.parametrization", "model.mup."))
        or (goes_on and k.startswith("model.") and is_fixed(k))
    ]
    rule = f"was another in {source.run}, and init.keep is {list(init.keep)}"
    fix = "set it back, or use init.keep = ['weights']"
    return _changed(keys, changed, rule, fix)


def _other_average(job: ResolvedJob, source: Source, averaged: bool) -> list[Problem]:
    """A problem of an average of the weights that the state has and the job does not, or the other way round."""
    init, decay = job.config.init, job.config.optimizer.ema.decay
    if "optimizer" not in init.keep or (decay is not None) == averaged:
        return []
    kept = f"init.keep {list(init.keep)} takes the optimizer's state"
    key, weights = "optimizer.ema.decay", "or use init.keep = ['weights'], which begins"
    if averaged:
        rule = f"must be set: {source.path} holds an average of the weights, and {kept}"
        fix = f"set the decay, {weights} with the average as weights"
        return [Problem(key, "missing", ..., rule, fix)]
    rule = f"needs an average of the weights, {source.path} holds none, and {kept}"
    return [Problem(key, "average", decay, rule, f"leave the decay out, {weights} an average")]


@contextlib.contextmanager
def _source_errors(init: InitConfig, path: Path) -> Iterator[None]:
    """Turn an exception of forge_ckpt or forge_data about the source into a JobError; nothing is begun afresh."""
    try:
        yield
    except InvalidData as error:
        rule, fix = "goes on in the parent's data", "leave 'cursor' out to begin with other data"
        also = Problem("init.keep", "data", list(init.keep), rule, fix)
        raise DataError([*problems_at(error, f"init.from {init.from_!r}"), also]) from error
    except (CorruptCheckpoint, OSError, ValueError) as error:
        kind: type[JobError] = StateError
        code, fix = "damaged", "name another checkpoint"

        if not os.path.lexists(path):
            rule = f"names {path}, an old checkpoint that was removed while it was read"
            code, kind = "removed", ConfigError
            fix = "name a newer one, or let the parent keep more (checkpoint.keep_every)"
        elif isinstance(error, CorruptCheckpoint):
            rule = f"is damaged: {error}"
        else:
            raise ConfigError(problems_at(error, f"init.from {init.from_!r}")) from error
        raise invalid("init.from", code, init.from_, rule, fix, kind=kind) from error
