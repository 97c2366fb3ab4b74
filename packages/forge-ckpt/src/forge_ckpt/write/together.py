"""One checkpoint written by all ranks: planned together, written apart, committed by one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from forge_ckpt.ranks import Ranks
from forge_ckpt.write.planner import ForgeSavePlanner
from forge_ckpt.write.plans import (
    key_of,
    plan_from_json,
    plan_to_json,
    results_from_json,
    results_to_json,
)
from forge_ckpt.write.writer import ForgeWriter


def write_together(
    ranks: Ranks, path: Path, step: int, content: Callable[[], dict[str, Any]], threads: int
) -> None:
    """Write ``content()`` of all ranks as ``path``; when this returns, on any rank, it is durable.

    Rank 0 commits, after every rank has written and synced its file. If one fails, nothing is
    committed, what was written is removed, and all raise (see :class:`Ranks`). If one dies, the
    others raise RuntimeError and what was written is left for the next open to remove.

    Communication: plans to rank 0, ``1`` or ``0`` for each box back, then digests and places to
    rank 0 and its word that it is committed. No byte of a tensor travels.
    """
    planner = ForgeSavePlanner()
    writer = ForgeWriter(path, step=step, threads=threads)
    made: list[Metadata] = []  # rank 0's

    def propose() -> dict[str, Any]:
        planner.set_up_planner(content(), is_coordinator=ranks.rank == 0)
        return plan_to_json(planner.create_local_plan())

    def divide(proposals: list[dict[str, Any]]) -> dict[str, Any]:
        plans = [plan_from_json(proposal) for proposal in proposals]
        kept, metadata = planner.create_global_plan(plans)
        made.append(metadata)
        kept = writer.prepare_global_plan(kept)
        name, _ = kept[0].storage_data
        return {"name": name, "kept": [_mask(a, b) for a, b in zip(plans, kept)]}

    def write() -> list[list[Any]]:
        items = [item for item, kept in zip(planner.plan.items, mine) if kept == "1"]
        plan = SavePlan(items, storage_data=(share["name"], ranks.rank))
        return results_to_json(writer.write_data(planner.finish_plan(plan), planner).value())

    def commit(results: list[list[list[Any]]]) -> None:
        writer.finish(made[0], [results_from_json(result) for result in results])

    try:
        share = ranks.through_first(propose, divide)
        mine = share["kept"][ranks.rank]
        ranks.through_first(write, commit)
    finally:
        if ranks.rank == 0:  # every rank has said that it is done, or is gone
            writer.discard()


def _mask(proposed: SavePlan, kept: SavePlan) -> str:
    """``1`` for each item that stays; a text, since it deflates to next to nothing."""
    keys = {key_of(item) for item in kept.items}
    return "".join("1" if key_of(item) in keys else "0" for item in proposed.items)
