"""[init]: what a run begins from, the checkpoint or folder that `init.from` names, and the tokenizer of its weights."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from forge_train._shared.fields import Checked, field
from forge_train._shared.paths import user_path
from forge_train._shared.problems import Problem, invalid, problems_of
from forge_train.errors import config_errors

#: In a run directory: the [model] table that an import left, and files of the imported folder that an export gives back.
NAME, FILES = "model.toml", "hf"


@dataclass(frozen=True)
class InitConfig(Checked):
    """Where a run begins: fresh values, or the state of another run, of which it becomes a fork."""

    seed: int | None = field(None, between=(0, 2**63 - 1))
    """seed of initial weights (default: run.seed)"""
    from_: str | None = None
    """begin with the state of a run (RUN, its newest checkpoint, or RUN@STEP), of one checkpoint, or of a folder of
    Hugging Face; read until this run has a checkpoint of its own"""
    keep: tuple[Literal["weights", "optimizer", "cursor"], ...] = ("weights",)
    """what is taken: only weights, with the optimizer's moments, or with the cursor too: step, data, random
    numbers, callbacks"""
    patterns: tuple[str, ...] = ()
    """tensors that are taken, as in fnmatch, '!' excludes; the others begin fresh (default: all)"""
    encoder: str | None = None
    """folder of Hugging Face whose weights the encoder of model.vision.transformers begins with (CLIP, SigLIP, or a
    model that has one); read until this run has a checkpoint of its own"""
    other_tokenizer: bool = False
    """weights of a folder of Hugging Face are trained with data of another tokenizer than the folder's"""
    vocab_size: int | None = field(None, between=(1, 2**31))
    """rows of embedding and head where tokens were added to the tokenizer of a folder of Hugging Face in from; each
    row that the folder lacks begins as the mean of its own"""

    def _problems(self) -> Iterator[Problem]:
        if self.vocab_size is not None and self.from_ is None:
            fix = "give from, or set model.vocab_size"
            yield Problem("vocab_size", "requires", self.vocab_size, "belongs to no source", fix)
        keep, patterns = list(self.keep), list(self.patterns)

        given = [
            key for key in ("keep", "patterns") if getattr(self, key) != getattr(InitConfig, key)
        ]
        if self.from_ is None and given:
            fix = f"give from, or leave {given[0]} out"
            value = list(getattr(self, given[0]))
            yield Problem(given[0], "requires", value, "belongs to no source", fix)

        if self.from_ is not None and not self.from_.strip("/ "):
            fix = "use from = 'runs/trunk@1000', or leave it out"
            yield Problem("from", "missing", self.from_, "must name a run", fix)

        if len(set(self.keep)) < len(self.keep) or "weights" not in self.keep:
            rule = "must hold 'weights', and no word twice"
            yield Problem("keep", "weights", keep, rule, "use keep = ['weights']")
        elif "cursor" in self.keep and "optimizer" not in self.keep:
            rule = "continues at the parent's step without its moments"
            yield Problem("keep", "moments", keep, rule, "add 'optimizer', or leave 'cursor' out")
        if self.patterns and "optimizer" in self.keep:
            rule = f"select some of the weights, and keep {keep} takes the moments of all"
            yield Problem("patterns", "excludes", patterns, rule, "use keep = ['weights']")


@dataclass(frozen=True)
class Source:
    """What `init.from` names: the checkpoint of a run (`run` is its folder, None for a copy elsewhere), or a folder
    of Hugging Face."""

    path: Path
    run: Path | None = None
    is_hf: bool = False


def find_source(name: str) -> Source:
    """The checkpoint or folder behind `init.from`; only names are looked at. ValueError with the rule and a fix."""
    path, step = user_path(name), None
    head, at, tail = name.rpartition("@")
    if at and tail.isdecimal() and not os.path.lexists(path):
        path, step = user_path(head), int(tail)
    if not os.path.isdir(path):
        fix = "name a run, one of its checkpoints, or a folder of Hugging Face"
        raise invalid("init.from", "not_found", name, f"names {path}, which is not a folder", fix)

    if path.name == "checkpoints" and committed(path.parent):
        path = path.parent
    if step is None and os.path.isfile(path / "manifest.json"):
        inside = path.absolute().parent
        return Source(path, inside.parent if inside.name == "checkpoints" else None)
    if step is None and os.path.isfile(path / "config.json"):
        return Source(path, is_hf=True)

    if not os.path.isdir(path / "checkpoints"):
        rule = (
            "is not a run (it has no folder checkpoints), not a checkpoint (no manifest.json) and not a folder of Hugging "
            "Face (no config.json)"
        )
        raise invalid("init.from", "unknown", name, rule, "name one")

    steps = committed(path)
    if not steps:
        fix = "train it until it has saved, or name another"
        raise invalid("init.from", "empty", name, "has no committed checkpoint", fix)
    if step is None:
        step = max(steps)
    if step not in steps:
        rule = (
            f"has no checkpoint of step {step}, which may have been removed as an old one (checkpoint.keep_every keeps "
            "some)"
        )
        fix = f"name one of {', '.join(map(str, sorted(steps)))}"
        raise invalid("init.from", "step", name, rule, fix)
    return Source(steps[step], path)


def _source_of_new(name: Any, run_dir: Any) -> Source | None:
    """What a run that has not begun begins from; None for a name that `source_problems` rejects."""
    if not isinstance(name, str) or not isinstance(run_dir, str) or has_begun(user_path(run_dir)):
        return None
    try:
        return find_source(name)
    except ValueError:
        return None


def hf_folder(name: Any, run_dir: Any) -> Path | None:
    """The folder of Hugging Face that a run, which has not begun, begins from; None for anything else."""
    source = _source_of_new(name, run_dir)
    return source.path if source and source.is_hf else None


def model_of_parent(name: Any, run_dir: Any) -> Path | None:
    """model.toml of the imported run that a run, which has not begun, begins from; None for anything else."""
    source = _source_of_new(name, run_dir)
    table = source.run / NAME if source and source.run else None
    return table if table and os.path.isfile(table) else None


def committed(run_dir: Path) -> dict[int, Path]:
    """Step -> directory of the committed checkpoints of a run."""
    if not os.path.isdir(run_dir):  # no path at all, maybe
        return {}
    found = (path.parent for path in run_dir.glob("checkpoints/step-*/manifest.json"))
    return {int(path.name[5:]): path for path in found if path.name[5:].isdecimal()}


def has_begun(run_dir: Path) -> bool:
    """Whether a run has saved before, be it damaged by now: it goes on from there, and [init] is not read."""
    quarantine = run_dir / "checkpoints/quarantine"
    return bool(committed(run_dir)) or (os.path.isdir(quarantine) and any(quarantine.iterdir()))


def source_problems(name: str | None, run_dir: Path) -> Sequence[Problem]:
    """Why a run in `run_dir` cannot begin from `name`, from names on the disk alone."""
    if name is None:
        return []
    problems: Sequence[Problem] = ()
    run = None
    try:
        run = find_source(name).run
    except ValueError as error:
        problems = problems_of(error)
    parents = [user_path(n) for n in (name, name.rpartition("@")[0] or name)]
    parents += [run] if run else []
    if os.path.realpath(run_dir) in map(os.path.realpath, parents):
        rule = f"is the run of init.from {name!r}, and a fork needs a folder of its own"
        return [Problem("run.dir", "parent", str(run_dir), rule, "choose another run.dir")]
    return [] if has_begun(run_dir) else problems


def tokenizer_problems(
    key: str, spec: Mapping[str, Any] | None, init: InitConfig, run_dir: Path
) -> list[Problem]:
    """The problem if the data of `key` was made with another tokenizer than the one next to the weights.

    `spec` is that of the data's source. None where data or weights have no tokenizer to compare.
    """
    if init.other_tokenizer or spec is None:
        return []
    # imports torch, which a report of a run does without
    from forge_data.tokenizer_files import gives_same_ids, tokenizer_in

    folder = folder_of_weights(init, run_dir)
    path = None if folder is None else tokenizer_in(folder)
    if path is None or gives_same_ids(spec, path):
        return []
    made = "bytes" if spec["name"] == "byte" else f"{spec.get('path', spec['name'])}"
    rule = f"is its tokenizer and must be that of the weights, {path}, or ids mean other texts"
    fix = f"prepare the text with --tokenizer {path}, or train the weights to another one with init.other_tokenizer = true"
    return [Problem(key, "weights", made, rule, fix)]


def folder_of_weights(init: InitConfig, run_dir: Path) -> Path | None:
    """The files of the folder of Hugging Face that the weights of a run are from; there may be none in it."""
    if init.from_ is None or has_begun(run_dir):
        return run_dir / FILES
    source = find_source(init.from_)
    return source.path if source.is_hf else source.run and source.run / FILES


def ends_of_weights(
    spec: Mapping[str, Any] | None, init: InitConfig, run_dir: Path
) -> tuple[int, ...]:
    """End tokens of the folder that the weights of a run are from, where the data has its tokenizer; ConfigError for a
    folder whose end tokens are no ids."""
    from forge_data.tokenizer_files import ends_beside  # imports torch

    folder = folder_of_weights(init, run_dir)
    with config_errors():
        return () if spec is None or folder is None else ends_beside(spec, folder)
