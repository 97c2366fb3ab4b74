"""A warm start: the weights of a checkpoint into a model that may be another one, with a report."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan

from forge_ckpt.errors import CheckpointMismatch
from forge_ckpt.files import Directory
from forge_ckpt.manifest import Manifest
from forge_ckpt.rank_group import RankGroup
from forge_ckpt.read.load import broadcast_manifest
from forge_ckpt.read.planner import ForgeLoadPlanner
from forge_ckpt.read.reader import ForgeReader, Staged, fill, metadata_of
from forge_ckpt.read.tensors import step_path


@dataclass(frozen=True)
class WeightsReport:
    """Names of the model's tensors that were ``copied``, of those left as they were (``fresh``), and of
    saved ones that went nowhere (``unused``)."""

    copied: list[str]
    fresh: list[str]
    unused: list[str]


def load_weights(
    path: str | os.PathLike[str],
    model: nn.Module,
    patterns: Sequence[str] = ("*",),
    *,
    key: str = "model",
    group: dist.ProcessGroup | None = None,
) -> WeightsReport:
    """Copy the tensors of a checkpoint that ``model`` has by name; nothing else is loaded.

    Usage::

        report = load_weights("runs/a/checkpoints", model, ["*", "!head.*"])

    ``path`` is a step (``.../step-00000100``) or a store, whose newest committed step is read; ``key`` is
    the model's name in the state that was saved. ``patterns`` are those of fnmatch on the model's names; one
    with ``!`` excludes. A tensor that is copied must have the saved shape; its dtype may be another one.

    In a process group all ranks call it. Each reads the blocks that its own shards touch, and every block of
    every rank is verified before the first tensor of any rank changes. Cost: host memory of what the
    rank copies. Raises CorruptCheckpoint, CheckpointMismatch that names both shapes, and ValueError where
    nothing would be copied.
    """
    ranks = RankGroup(group)
    chosen = Path(ranks.run_on_rank_0(lambda: str(step_path(Path(path)))))
    table = broadcast_manifest(ranks, chosen, None)
    planner, reader = ForgeLoadPlanner(), ForgeReader(chosen)
    here = {n: t for n, t in model.state_dict().items() if isinstance(t, Tensor)}
    saved = {
        name.removeprefix(f"{key}."): name
        for name, entry in table.tensors.items()
        if entry.path[0] == key
    }
    copied = [name for name in here if name in saved and _matches(name, patterns)]

    def stage() -> Staged:
        _check({name: here[name] for name in copied}, saved, table, patterns)
        wanted = {saved[name]: here[name] for name in copied}
        metadata = metadata_of(table)
        planner.set_up_planner({key: {name: here[name] for name in copied}}, metadata)
        plan = create_default_local_load_plan(wanted, metadata)
        reader.use(Directory(chosen), table)
        try:
            return reader.stage(plan, planner)
        finally:
            reader.close()

    staged = ranks.run_on_all_ranks(stage)
    ranks.run_on_all_ranks(lambda: fill(staged, planner))
    return WeightsReport(
        copied,
        [name for name in here if name not in copied],
        [name for name in saved if name not in copied],
    )


def _matches(name: str, patterns: Sequence[str]) -> bool:
    excluded = any(fnmatchcase(name, p[1:]) for p in patterns if p.startswith("!"))
    return not excluded and any(fnmatchcase(name, p) for p in patterns)


def _check(
    wanted: dict[str, Tensor], saved: dict[str, str], table: Manifest, patterns: Sequence[str]
) -> None:
    if not wanted:
        like = next(iter(saved.values()), next(iter(table.tensors), "none at all"))
        raise ValueError(
            f"no tensor of the model is saved under a name that {list(patterns)} matches; the saved names are "
            f"like {like!r}: give another key or other patterns"
        )
    problems = []
    for name, tensor in wanted.items():
        shape = table.tensors[saved[name]].shape
        if tensor.is_meta:
            problems.append(f"{name} is on the meta device; materialise it (to_empty) before")
        elif shape != tuple(tensor.shape):
            problems.append(
                f"{name}: saved {shape}, here {tuple(tensor.shape)}; '!{name}' excludes it"
            )
    if problems:
        more = f"\n  and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise CheckpointMismatch(
            "the weights do not fit the model\n  " + "\n  ".join(problems[:8]) + more
        )
