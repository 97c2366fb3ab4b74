"""parallel.layout = "auto": the planner chooses once, and a run directory keeps the choice."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import tomlkit
from torch import nn

from forge_moe.hooks import num_experts_by_layer
from forge_parallel import ParallelConfig, World
from forge_parallel.plan import Topology
from forge_train._shared.toml_files import read_text
from forge_train.config.resolve import ResolvedJob
from forge_train.trainer.run_directory import RunDirectory

_ORIGIN = "chosen by the planner"


def with_layout(job: ResolvedJob, world: World) -> tuple[ResolvedJob, list[str]]:
    """The job with its layout chosen, and the reasons; a manual layout stays as it is.

    A resumed run keeps the layout that was chosen before for as many ranks; for another number it is chosen anew.
    """
    parallel = job.config.parallel
    if parallel.layout == "manual":
        return job, []
    per_node = parallel.gpus_per_node or world.local_world_size
    earlier = _earlier(job, world.world_size, per_node)
    if earlier is not None:
        return _with(job, earlier), [f"kept from {job.config.run.dir}"]
    from forge_train.plan import choose_layout  # the planner, which few runs need

    chosen, reasons = choose_layout(job, world.world_size, per_node)
    return _with(job, chosen), reasons


def describe_placement(config: ParallelConfig, world: World, model: nn.Module) -> list[str]:
    """A line for each axis: its ranks, and whether it leaves a node."""
    per_node = config.gpus_per_node or world.local_world_size
    layout = config.axes(world.world_size, per_node)
    return Topology(layout, per_node).placement(bool(num_experts_by_layer(model)))


def _earlier(job: ResolvedJob, world_size: int, per_node: int) -> ParallelConfig | None:
    """The layout that the planner chose for the last life of this run; None if there is none that fits."""
    paths = RunDirectory(job.config.run.dir)
    if paths.num_ranks() not in (None, world_size):
        return None
    path = paths.config
    try:
        table: Any = tomlkit.parse(read_text(path))["parallel"]
        rows = [(key.key, item) for key, item in table.value.body if key is not None]
        chosen = {key: item.unwrap() for key, item in rows if _ORIGIN in item.trivia.comment}
        earlier = replace(job.config.parallel, **chosen)
        earlier.axes(world_size, per_node)
    except (KeyError, TypeError, ValueError):  # written by another version, or for other ranks
        return None
    return earlier if chosen else None


def _with(job: ResolvedJob, parallel: ParallelConfig) -> ResolvedJob:
    before = job.config.parallel
    changed = [
        f.name for f in fields(parallel) if getattr(parallel, f.name) != getattr(before, f.name)
    ]
    origins = {**job.origins, **{f"parallel.{name}": _ORIGIN for name in changed}}
    return ResolvedJob(replace(job.config, parallel=parallel), origins)
