"""A warm start: the weights of a checkpoint into a model that may be another one, with a report."""

import difflib
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan

from forge_ckpt._shared.names import match_names
from forge_ckpt._shared.paths import user_path
from forge_ckpt._shared.problems import Problem, invalid, raise_problems
from forge_ckpt.errors import mismatch
from forge_ckpt.rank_group import RankGroup
from forge_ckpt.read.load import broadcast_manifest, open_on_rank
from forge_ckpt.read.planner import ForgeLoadPlanner
from forge_ckpt.read.reader import ForgeReader, Staged, fill, metadata_of
from forge_ckpt.read.tensors import step_path

__all__ = ["first_names"]

_Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class WeightsReport:
    """Names of the model's tensors that were ``copied``, of those left as they were (``fresh``), and of
    saved ones that went nowhere (``unused``)."""

    copied: list[str]
    fresh: list[str]
    unused: list[str]

    def __str__(self) -> str:
        rest = (("fresh", self.fresh), ("of the source unused", self.unused))
        parts = [f"{len(n)} {what}" + (f" ({first_names(n)})" if n else "") for what, n in rest]
        return f"{len(self.copied)} tensors taken, {', '.join(parts)}"

    @property
    def difference(self) -> str:
        """What only one of model and checkpoint has, for a user; "" if both have the same tensors."""
        if self.fresh:
            return f"{first_names(self.fresh)} only here"
        return f"{first_names(self.unused)} only there" if self.unused else ""


def first_names(names: Sequence[str]) -> str:
    """The first three names, for a user."""
    return ", ".join(names[:3]) + ", ..." * (len(names) > 3)


def match_weights(
    here: Mapping[str, Tensor], saved: Mapping[str, Tensor], patterns: Sequence[str] = ("*",)
) -> WeightsReport:
    """The report that a warm start of ``here`` from ``saved`` would have; nothing is copied.

        report = match_weights(model.state_dict(), saved.below("model"), ["*", "!head.*"])

    Only names and shapes count: both may be on the meta device. ``patterns`` as in :func:`load_weights`.
    Raises as that does: ValueError where nothing would be copied or a pattern matches nothing,
    CheckpointMismatch that names both shapes of a tensor.
    """
    there = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    report = _match(here.keys(), there, patterns)
    _refuse_other_shapes({name: here[name] for name in report.copied}, there)
    return report


def load_weights(
    path: str | os.PathLike[str],
    model: nn.Module,
    patterns: Sequence[str] = ("*",),
    *,
    key: str = "model",
    names: Collection[str] | None = None,
    group: dist.ProcessGroup | None = None,
) -> WeightsReport:
    """Copy the tensors of a checkpoint that ``model`` has by name; nothing else is loaded.

    Usage::

        report = load_weights("runs/a/checkpoints", model, ["*", "!head.*"])

    ``path`` is a step (``.../step-00000100``) or a store, whose newest step is read; ``key`` is
    the model's name in the state that was saved. ``patterns`` are those of fnmatch on the model's names; one
    with ``!`` excludes, from all if there are no others. A tensor that is copied must have the saved shape;
    its dtype may be another one. ``names`` are those of the whole model where ``model`` is this rank's part
    of it, such as a pipeline stage: patterns and report are about the whole.

    In a process group all ranks call it. Each reads the blocks that its own shards touch, and every block of
    every rank is verified before the first tensor of any rank changes. Cost: as of
    :class:`forge_ckpt.ForgeReader`. Raises CorruptCheckpoint, CheckpointMismatch that names both shapes, and ValueError where
    nothing would be copied or a pattern matches nothing.
    """
    ranks = RankGroup(group)
    chosen = Path(ranks.run_on_rank_0(lambda: str(step_path(user_path(path)))))
    table = broadcast_manifest(ranks, chosen, None)
    planner, reader = ForgeLoadPlanner(), ForgeReader(chosen)
    here = {n: t for n, t in model.state_dict().items() if isinstance(t, Tensor)}
    saved = table.tensors_below(key)
    if not saved:
        like = next(iter(table.tensors), "none at all")
        rule = f"is a name below which {chosen} has no tensor"
        fix = f"the saved names are like {like!r}: give another key"
        raise invalid("key", "not_found", key, rule, fix)

    shapes = {name: table.tensors[full].shape for name, full in saved.items()}
    report = ranks.run_on_all_ranks(
        lambda: _match(here if names is None else names, shapes, patterns)
    )
    copied = [name for name in report.copied if name in here]

    def stage() -> Staged:
        filled = {name: here[name] for name in copied}
        _refuse_other_shapes(filled, shapes, meta=False)
        wanted = {saved[name]: tensor for name, tensor in filled.items()}
        metadata = metadata_of(table)
        planner.set_up_planner({key: filled}, metadata)
        plan = create_default_local_load_plan(wanted, metadata)
        reader.use(open_on_rank(ranks, chosen), table)
        return reader.stage(plan, planner)

    try:
        staged = ranks.run_on_all_ranks(stage)
        ranks.run_on_all_ranks(lambda: fill(staged, planner))
    finally:
        reader.close()
    return report


def _match(here: Collection[str], saved: _Shapes, patterns: Sequence[str]) -> WeightsReport:
    """The report for the names of a model; ValueError for patterns that match nothing."""
    both = [name for name in here if name in saved]
    # an excluded name may be in one of them only, so its pattern is looked for in either
    idle = [p for p in patterns if not p.startswith("!") and not match_names([p], both)]
    excluding = [p for p in patterns if p.startswith("!")]
    idle += [p for p in excluding if not match_names([p[1:]], {*here, *saved})]
    if idle and both:
        raise_problems("", (_idle(pattern, both) for pattern in idle))
    chosen = patterns if len(excluding) < len(patterns) else [*patterns, "*"]
    copied = match_names(chosen, both)
    if not copied:
        like = next(iter(saved), "none at all")
        rule = "match no tensor of the model that is saved"
        fix = f"the saved names are like {like!r}: give another key or other patterns"
        raise invalid("patterns", "nothing", list(patterns), rule, fix)

    taken = set(copied)
    return WeightsReport(
        copied,
        [name for name in here if name not in taken],
        [name for name in saved if name not in taken],
    )


def _idle(pattern: str, names: Sequence[str]) -> Problem:
    """The problem of a pattern that matches no name, with the nearest name or folder of names."""
    parts = [name.split(".") for name in names]
    folders = {".".join(part[:n]) + ".*" for part in parts for n in range(1, len(part))}
    mark = "!" * pattern.startswith("!")
    near = difflib.get_close_matches(pattern.lstrip("!"), [*names, *sorted(folders)], 1, cutoff=0.0)
    fix = f"did you mean {mark + near[0]!r}?" if near else "leave it out"
    rule = "matches no tensor that model and checkpoint have"
    return Problem("patterns", "unmatched", pattern, rule, fix)


def _refuse_other_shapes(wanted: Mapping[str, Tensor], saved: _Shapes, meta: bool = True) -> None:
    """Raise CheckpointMismatch for tensors of another shape, and unless ``meta`` for those without memory."""
    problems = []
    for name, tensor in wanted.items():
        if saved[name] != (shape := tuple(tensor.shape)):
            fix = f"'!{name}' excludes it"
            problems.append(Problem(name, "shape", shape, f"is saved as {saved[name]}", fix))
    if not problems and not meta:
        rule, fix = "is on the meta device", "materialize it (to_empty) before"
        problems = [Problem(n, "meta", ..., rule, fix) for n, t in wanted.items() if t.is_meta]
    if problems:
        raise mismatch(Problem("", "weights", ..., "the weights do not fit the model"), problems)
