"""All ranks save one checkpoint: rank 0 plans, each rank stages or writes its file, rank 0 commits."""

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from forge_ckpt.rank_group import RankGroup
from forge_ckpt.write.deduplicate import key_of
from forge_ckpt.write.layout import FileLayout
from forge_ckpt.write.plan_json import (
    plan_from_json,
    plan_to_json,
    results_from_json,
    results_to_json,
)
from forge_ckpt.write.planner import ForgeSavePlanner
from forge_ckpt.write.staging import StagingArea
from forge_ckpt.write.writer import ForgeWriter


class PlannedSave:
    """A checkpoint that all ranks have planned; the constructor is collective.

    ``stage`` or nothing, then ``write_and_commit``, which may run in another thread after ``stage``: it
    no longer reads the state. If any of them raises, on any rank, call ``discard``.

    Communication: plans to rank 0 and ``1`` or ``0`` for each box back; at the commit digests and
    locations to rank 0, and its confirmation. No tensor is communicated.
    """

    def __init__(
        self, group: RankGroup, writer: ForgeWriter, content: Callable[[], dict[str, Any]]
    ) -> None:
        self.writer = writer
        self._rank = group.rank
        self._layout: FileLayout | None = None
        self._staged: StagingArea | None = None
        self._metadata: Metadata | None = None  # of rank 0
        planner = self._planner = ForgeSavePlanner()

        def propose() -> dict[str, Any]:
            planner.set_up_planner(content(), is_coordinator=group.rank == 0)
            return plan_to_json(planner.create_local_plan())

        def assign(proposals: list[dict[str, Any]]) -> dict[str, Any]:
            plans = [plan_from_json(proposal) for proposal in proposals]
            tied = {name for plan in plans for name in plan.planner_data["ties"]}
            assigned, self._metadata = planner.create_global_plan(plans)
            _check_space(writer.path.parent, assigned, tied)
            assigned = writer.prepare_global_plan(assigned)
            name, _ = assigned[0].storage_data
            return {"name": name, "masks": [_mask(a, b) for a, b in zip(plans, assigned)]}

        try:
            assignment = group.map_reduce(propose, assign)
        except BaseException:
            self.discard()
            raise
        mask = assignment["masks"][group.rank]
        items = [item for item, assigned in zip(planner.plan.items, mask) if assigned == "1"]
        self._plan = SavePlan(items, storage_data=(assignment["name"], group.rank))

    @property
    def layout(self) -> FileLayout:
        """This rank's file."""
        if self._layout is None:
            self._layout = self.writer.layout(self._planner.finish_plan(self._plan), self._planner)
        return self._layout

    def stage(self, area: StagingArea) -> None:
        """Copy this rank's tensors: the save no longer depends on the state."""
        area.stage(self.layout)
        self._staged = area

    def write_and_commit(self, group: RankGroup, written: Callable[[], None]) -> None:
        """Write, and commit when all ranks have written and synced; durable when it returns on any rank.

        ``written`` is called on rank 0 before the commit, on others after their own file is on disk. If
        one rank fails, nothing is committed and all ranks raise; if one dies, the others raise
        RuntimeError, and the next open removes the written files.
        """

        def write() -> list[list[Any]]:
            staged = None if self._staged is None else self._staged.bytes_of_file()
            results = results_to_json(self.writer.write_layout(self.layout, staged))
            if self._rank:
                written()
            return results

        def commit(results: list[list[list[Any]]]) -> None:
            written()
            assert self._metadata is not None
            self.writer.finish(self._metadata, [results_from_json(result) for result in results])

        # Rank 0 commits in the reduction, so the rename follows the fsync of every rank's file.
        group.map_reduce(write, commit)

    def discard(self) -> None:
        """Remove what was written, unless it is committed. After an exchange no rank writes any more: each
        has reported, or its process has ended. So rank 0 alone removes."""
        if self._rank == 0:
            self.writer.discard()


def _check_space(directory: Path, plans: list[SavePlan], tied: set[str]) -> None:
    """Raise OSError if the disk has less room than the tensors need; those in ``tied`` need none of their own."""
    items = [item for plan in plans for item in plan.items if item.index.fqn not in tied]
    needed = sum(item.tensor_storage_size() or 0 for item in items)
    directory.mkdir(parents=True, exist_ok=True)
    total, _, free = shutil.disk_usage(directory)
    if total and free < needed:  # a file system that reports no size reports no room either
        raise OSError(
            errno.ENOSPC,
            f"{needed / 1e9:.3g} GB to write, {free / 1e9:.3g} GB are free on this disk",
        )


def _mask(proposed: SavePlan, assigned: SavePlan) -> str:
    """``1`` for each proposed item that the rank writes; a string, which compresses to a few bytes."""
    keys = {key_of(item) for item in assigned.items}
    return "".join("1" if key_of(item) in keys else "0" for item in proposed.items)
