"""From a model to this rank's part of it, and to the stages that the part consists of."""

from __future__ import annotations

from typing import Any

from torch import nn

from forge_parallel._shared.problems import raise_problems
from forge_parallel.config import ParallelConfig
from forge_parallel.legal import tied_on_one_rank
from forge_parallel.meshes import Meshes
from forge_parallel.order import mark
from forge_parallel.pipeline.cut import block_costs, stage_ranges
from forge_parallel.pipeline.parts import blocks_by_key, parts_of
from forge_parallel.stages import num_stages, stages_on
from forge_parallel.structure import Structure, stages_of


def split(
    model: nn.Module,
    config: ParallelConfig,
    meshes: Meshes,
    *,
    seq_len: int = 2048,
    structure: Structure | None = None,
) -> list[nn.Module]:
    """Prune `model` in place to this rank's part and return its stages, in order of depth.

        stages = split(model, config, meshes, seq_len=2048)
        for stage in stages:
            apply_fsdp(stage, ...)                 # each is a root of FSDP2
        optimizer = SGD(model.parameters())        # the part of this rank, under the names of the whole

    Children of other ranks become None, and the container of the blocks keeps its keys, so names are those of
    the whole model. Depth is cut by cost in rows of `seq_len` (see `block_costs`). The only stage of a rank is
    `model` itself; each of several is a shallow copy of it that shares its modules, so replace modules (float8)
    before. A child without parameters belongs to all stages. `structure` is that of `structure_of`, if it was
    found before.

    Costs nothing; no communication. ValueError as `parts_of` and `stage_ranges`, and for tied parts in a
    V-schedule, whose two ends are one rank; OrderError after a later step, or a second time.
    """
    parts = parts_of(model, structure)
    if wrong := tied_on_one_rank(config, parts.tied):
        raise_problems("", [wrong])
    count, keys = num_stages(config), list(blocks_by_key(model, parts))
    ranges = stage_ranges(block_costs(model, parts, seq_len), count, parts.first_blocks)
    mark(model, "split")
    local = stages_on(config, meshes.pp.rank)
    blocks = {stage: {keys[i] for i in ranges[stage]} for stage in local}
    ends = {stage: _ends(parts, stage, count) for stage in local}
    _prune(model, parts, set().union(*ends.values()), set().union(*blocks.values()))
    stages = [model]
    if len(local) > 1:
        stages = [_stage(model, parts, ends[stage], blocks[stage]) for stage in local]
    for stage, module in zip(local, stages):
        module.pipeline_stage = stage  # type: ignore[assignment]
    model.__dict__["pipeline_stages"] = stages
    model.__dict__["pipeline_tied"] = parts.tied
    return stages


def tied_names(model: nn.Module) -> tuple[str, ...]:
    """Children that the first and the last stage both hold, as `split` found them."""
    names: tuple[str, ...] = vars(model).get("pipeline_tied", ())
    return names


def follow_mode(model: nn.Module) -> None:
    """Put stages into training or eval mode as `model` is: `model.train()` does not reach their copied modules."""
    for stage in stages_of(model):
        for module in (stage, *stage.children()):
            if module not in model._modules.values():
                module.training = model.training


def _ends(parts: Structure, stage: int, count: int) -> set[str]:
    """Names of the modules that a stage has besides blocks."""
    return {*(parts.first if stage == 0 else ()), *(parts.last if stage == count - 1 else ())}


def _prune(model: nn.Module, parts: Structure, ends: set[str], blocks: set[str]) -> None:
    for name in parts.ends:
        if name not in ends:
            setattr(model, name, None)
    container: Any = model._modules[parts.container]
    for key in set(container._modules) - blocks:
        del container._modules[key]  # not `del container[key]`, which renumbers a ModuleList


def _stage(model: nn.Module, parts: Structure, ends: set[str], blocks: set[str]) -> nn.Module:
    """A shallow copy of `model` with these children alone; modules, parameters and buffers are shared."""
    container = _shallow_copy(getattr(model, parts.container))
    for key in set(container._modules) - blocks:
        del container._modules[key]
    stage = _shallow_copy(model)
    stage._modules |= dict.fromkeys(set(parts.ends) - ends) | {parts.container: container}
    return stage


def _shallow_copy(module: nn.Module) -> nn.Module:
    """A module of the same class and attributes, with hooks and children of its own: FSDP2 and `Pipeline` register
    hooks on each stage, and change its class."""
    twin = object.__new__(type(module))
    for name, value in vars(module).items():
        own = name.startswith("_") and name != "_buffers" and isinstance(value, dict | set)
        vars(twin)[name] = value.copy() if own else value
    return twin
