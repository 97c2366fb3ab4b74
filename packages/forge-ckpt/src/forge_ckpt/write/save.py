"""All ranks save one checkpoint: rank 0 plans, each rank writes its file, rank 0 commits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from forge_ckpt.rank_group import RankGroup
from forge_ckpt.write.deduplicate import key_of
from forge_ckpt.write.plan_json import (
    plan_from_json,
    plan_to_json,
    results_from_json,
    results_to_json,
)
from forge_ckpt.write.planner import ForgeSavePlanner
from forge_ckpt.write.writer import ForgeWriter


def save_checkpoint(
    group: RankGroup, path: Path, step: int, content: Callable[[], dict[str, Any]], threads: int
) -> None:
    """Save ``content()`` of all ranks as ``path``; it is durable when this returns on any rank.

    Rank 0 commits after every rank has written and synced its file. If a rank fails, nothing is
    committed, the written files are removed, and all ranks raise (see :class:`RankGroup`). If a
    rank dies, the others raise RuntimeError and the next open removes the written files.

    Communication: plans to rank 0, ``1`` or ``0`` for each box back, then digests and locations to
    rank 0, and its confirmation of the commit. No tensor is communicated.
    """
    planner = ForgeSavePlanner()
    writer = ForgeWriter(path, step=step, threads=threads)
    merged: list[Metadata] = []  # set on rank 0 only

    def propose() -> dict[str, Any]:
        planner.set_up_planner(content(), is_coordinator=group.rank == 0)
        return plan_to_json(planner.create_local_plan())

    def assign(proposals: list[dict[str, Any]]) -> dict[str, Any]:
        plans = [plan_from_json(proposal) for proposal in proposals]
        assigned, metadata = planner.create_global_plan(plans)
        merged.append(metadata)
        assigned = writer.prepare_global_plan(assigned)
        name, _ = assigned[0].storage_data
        return {"name": name, "masks": [_mask(a, b) for a, b in zip(plans, assigned)]}

    def write() -> list[list[Any]]:
        mask = assignment["masks"][group.rank]
        items = [item for item, assigned in zip(planner.plan.items, mask) if assigned == "1"]
        plan = SavePlan(items, storage_data=(assignment["name"], group.rank))
        return results_to_json(writer.write_data(planner.finish_plan(plan), planner).value())

    def commit(results: list[list[list[Any]]]) -> None:
        writer.finish(merged[0], [results_from_json(result) for result in results])

    try:
        assignment = group.map_reduce(propose, assign)
        # Rank 0 commits in the reduction, so the rename follows the fsync of every rank's file.
        group.map_reduce(write, commit)
    finally:
        # After the exchange no rank writes any more: each has reported, or its process has ended.
        # Rank 0 alone removes, and only what was not committed.
        if group.rank == 0:
            writer.discard()


def _mask(proposed: SavePlan, assigned: SavePlan) -> str:
    """``1`` for each proposed item that the rank writes; a string, which compresses to a few bytes."""
    keys = {key_of(item) for item in assigned.items}
    return "".join("1" if key_of(item) in keys else "0" for item in proposed.items)
