"""All ranks save one checkpoint: rank 0 plans, each rank stages or writes its file, rank 0 commits."""

import errno
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from forge_ckpt.rank_group import RankGroup
from forge_ckpt.write.planner import (
    FileLayout,
    ForgeSavePlanner,
    Proposal,
    Structure,
    choose_writers,
    key_of,
    results_from_json,
    results_to_json,
)
from forge_ckpt.write.staging import StagingArea
from forge_ckpt.write.writer import ForgeWriter


@dataclass
class SavePlans:
    """The plans of the save before: states of the same structure are planned once.

    structure: of this rank's state. items: what this rank writes. metadata: on rank 0, of all ranks. needed_bytes: of all
    ranks, known to rank 0.

    Planning a job costs rank 0 about 0.1 ms for each box of each rank, while all ranks wait.
    """

    structure: Structure | None = None
    items: list[WriteItem] = field(default_factory=list)
    metadata: Metadata | None = None
    needed_bytes: int = 0


@dataclass(eq=False)
class PlannedSave:
    """A checkpoint that all ranks have planned, as `plan_save` makes it; ``metadata`` is None but on rank 0.

    ``stage`` or nothing, then ``write_and_commit``, which may run in another thread after ``stage``: it
    no longer reads the state. If any of them raises, on any rank, call ``discard``.

    Communication: at the commit digests and locations to rank 0, and its confirmation. No tensor is communicated.
    """

    rank: int
    writer: ForgeWriter
    planner: ForgeSavePlanner
    plan: SavePlan
    metadata: Metadata | None
    _layout: FileLayout | None = None
    _staged: StagingArea | None = None

    @property
    def layout(self) -> FileLayout:
        """This rank's file."""
        if self._layout is None:
            self._layout = self.writer.layout(self.planner.finish_plan(self.plan), self.planner)
        return self._layout

    def stage(self, area: StagingArea) -> None:
        """Copy this rank's tensors: the save no longer depends on the state, nor keeps its memory."""
        area.stage(self.layout)
        self._staged = area
        self.planner.state_dict = {}
        # Of CUDA tensors the copies are still queued; their memory must not be reused on another stream.
        held = tuple(p for p in self.layout.pieces if p.tensor.device.type == "cuda")
        self._layout = replace(self.layout, pieces=held)

    def write_and_commit(self, group: RankGroup, written: Callable[[], None]) -> None:
        """Write, and commit when all ranks have written and synced; durable when it returns on any rank.

        ``written`` is called on rank 0 before the commit, on others after their own file is on disk. If
        one rank fails, nothing is committed and all ranks raise; if one dies, the others raise
        RuntimeError, and the next open removes the written files unless they are committed.
        """

        def write() -> list[list[Any]]:
            staged = None if self._staged is None else self._staged.bytes_of_file()
            results = results_to_json(self.writer.write_layout(self.layout, staged))
            if self.rank:
                written()
            return results

        def commit(results: list[list[list[Any]]]) -> None:
            written()
            assert self.metadata is not None
            self.writer.finish(self.metadata, [results_from_json(result) for result in results])

        # Rank 0 commits in the reduction, so the rename follows the fsync of every rank's file.
        group.map_reduce(write, commit)

    def discard(self) -> None:
        """Remove what was written, unless it is committed. After an exchange no rank writes any more: each
        has reported, or its process has ended. So rank 0 alone removes."""
        if self.rank == 0:
            self.writer.discard()


def plan_save(
    group: RankGroup, writer: ForgeWriter, content: Callable[[], dict[str, Any]], plans: SavePlans
) -> PlannedSave:
    """Plan a checkpoint of ``content()`` on all ranks, and make its directory. Collective.

    ``plans`` are used if they fit all ranks, and else replaced. Communication: plans to rank 0 and ``1`` or ``0`` for
    each box back, unless they are those of the save before. Leaves no directory if it raises.
    """
    planner = ForgeSavePlanner()
    structure: list[Structure] = []

    def set_up() -> bool:
        planner.set_up_planner(content(), is_coordinator=group.rank == 0)
        structure.append(planner.structure())
        return plans.structure == structure[0]

    def reuse(alike: list[bool]) -> str | None:
        """The name of the new directory, or None if a rank's state has another structure now."""
        if not all(alike):
            return None
        _check_space(writer.path.parent, plans.needed_bytes)
        return writer.make_directory()

    try:
        name: str | None = group.map_reduce(set_up, reuse)
        if name is None:
            name = _plan(group, planner, writer, plans)
            plans.structure = structure[0]
    except BaseException:
        if group.rank == 0:
            writer.discard()
        raise

    plan = SavePlan(plans.items, storage_data=(name, group.rank))
    return PlannedSave(group.rank, writer, planner, plan, plans.metadata)


def _plan(
    group: RankGroup, planner: ForgeSavePlanner, writer: ForgeWriter, plans: SavePlans
) -> str:
    """Plan anew, into ``plans``; returns the name of the new directory. Collective."""

    def propose() -> dict[str, Any]:
        return planner.propose().to_json()

    def assign(values: list[dict[str, Any]]) -> dict[str, Any]:
        proposals = [Proposal.from_json(value) for value in values]
        writers = choose_writers(proposals)
        assigned, plans.metadata = planner.assign(proposals, writers)

        tied = {name for proposal in proposals for name in proposal.ties}
        items = [item for plan in assigned for item in plan.items if item.index.fqn not in tied]
        plans.needed_bytes = sum(item.tensor_storage_size() or 0 for item in items)
        _check_space(writer.path.parent, plans.needed_bytes)
        # 1 for each proposed item that the rank writes; a string, which compresses to a few bytes
        masks = [
            "".join("01"[writers[key_of(item)] == rank] for item in proposal.items)
            for rank, proposal in enumerate(proposals)
        ]
        return {"name": writer.make_directory(), "masks": masks}

    plans.structure = None  # a failure leaves no plan that looks complete
    assignment = group.map_reduce(propose, assign)
    mask = assignment["masks"][group.rank]
    plans.items = [item for item, wanted in zip(planner.plan.items, mask) if wanted == "1"]
    name: str = assignment["name"]
    return name


def _check_space(directory: Path, needed: int) -> None:
    """Raise OSError if the disk has less room than ``needed`` bytes."""
    total, _, free = shutil.disk_usage(directory)
    if total and free < needed:  # a file system that reports no size reports no room either
        raise OSError(
            errno.ENOSPC,
            f"{needed / 1e9:.3g} GB to write, {free / 1e9:.3g} GB are free on this disk",
        )
