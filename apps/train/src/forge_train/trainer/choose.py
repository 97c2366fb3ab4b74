"""parallel.layout = "auto": the planner's choice, kept for the life of a run directory."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import tomlkit

from forge_parallel import ParallelConfig, World
from forge_parallel.plan import Topology
from forge_train.config.files import read_text
from forge_train.config.resolve import ResolvedJob
from forge_train.trainer.run_directory import RunDirectory

_ORIGIN = "chosen by the planner"


def with_layout(job: ResolvedJob, world: World) -> tuple[ResolvedJob, list[str]]:
    """The job with a layout of its own, and why it is this one; a manual layout stays as it is.

    A run that goes on keeps what was chosen when it began, as long as that fits the ranks there are.
    """
    parallel = job.config.parallel
    if parallel.layout == "manual":
        return job, []
    per_node = parallel.gpus_per_node or world.local_world_size
    kept = _kept(job, world.world_size, per_node)
    if kept is not None:
        return _with(job, kept), [f"kept from {job.config.run.dir}"]
    from forge_train.plan import choose_layout  # the planner, which few runs need

    chosen, reasons = choose_layout(job, world.world_size, per_node)
    return _with(job, chosen), reasons


def placement(config: ParallelConfig, world: World, *, experts: bool) -> list[str]:
    """A line for each axis: its ranks, and whether it leaves a node."""
    per_node = config.gpus_per_node or world.local_world_size
    layout = config.axes(world.world_size, per_node)
    return Topology(layout, per_node).placement(experts)


def _kept(job: ResolvedJob, world_size: int, per_node: int) -> ParallelConfig | None:
    """What the planner chose when this run began, if it fits."""
    path = RunDirectory(job.config.run.dir).config
    try:
        table: Any = tomlkit.parse(read_text(path))["parallel"]
        rows = [(key.key, item) for key, item in table.value.body if key is not None]
        chosen = {key: item.unwrap() for key, item in rows if _ORIGIN in item.trivia.comment}
        kept = replace(job.config.parallel, **chosen)
        kept.axes(world_size, per_node)
    except (KeyError, TypeError, ValueError):  # of another version, or of other ranks
        return None
    return kept if chosen else None


def _with(job: ResolvedJob, parallel: ParallelConfig) -> ResolvedJob:
    before = job.config.parallel
    changed = [
        f.name for f in fields(parallel) if getattr(parallel, f.name) != getattr(before, f.name)
    ]
    origins = {**job.origins, **{f"parallel.{name}": _ORIGIN for name in changed}}
    return ResolvedJob(replace(job.config, parallel=parallel), origins)
