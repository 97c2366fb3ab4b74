"""From a model to this rank's part of it, and to the stages that the part consists of."""

from __future__ import annotations

from typing import Any

from torch import nn

from forge_parallel.config import ParallelConfig
from forge_parallel.legal import tied_on_one_rank
from forge_parallel.meshes import Meshes
from forge_parallel.order import mark
from forge_parallel.pipeline.cut import block_costs, stage_ranges
from forge_parallel.pipeline.parts import blocks_by_key, parts_of
from forge_parallel.stages import num_stages, stages_on
from forge_parallel.structure import Structure


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

    What the rank does not own becomes None, and the container of the blocks keeps its keys, so names are
    those of the whole model. Depth is cut by cost in rows of `seq_len` (see `block_costs`). Where a rank has
    one stage that is `model` itself. Where it has several each is a view: a model of the same class with
    the same modules inside; a module that a later step puts into a view is put into `model`, too. What
    belongs to no stage (a child without parameters) stays in all. `structure` is that of `structure_of`, if it
    was found before.

    Costs nothing; no communication. ValueError as `parts_of` and `stage_ranges`, and for tied parts in a
    V-schedule, whose two ends are one rank; OrderError after a later step, or a second time.
    """
    parts = parts_of(model, structure)
    if wrong := tied_on_one_rank(config, parts.tied):
        raise ValueError(wrong)
    count, keys = num_stages(config), list(blocks_by_key(model, parts))
    ranges = stage_ranges(block_costs(model, parts, seq_len), count)
    mark(model, "split")
    mine = stages_on(config, meshes.pp.rank)
    blocks = {stage: {keys[i] for i in ranges[stage]} for stage in mine}
    ends = {stage: _ends(parts, stage, count) for stage in mine}
    _prune(model, parts, set().union(*ends.values()), set().union(*blocks.values()))
    stages = [model]
    if len(mine) > 1:
        stages = [_view(model, parts, ends[stage], blocks[stage]) for stage in mine]
    for stage, module in zip(mine, stages):
        module.pipeline_stage = stage  # type: ignore[assignment]
    model.__dict__["pipeline_stages"] = stages
    model.__dict__["pipeline_tied"] = parts.tied
    return stages


def stages_of(model: nn.Module) -> list[nn.Module]:
    """The stages of this rank as `split` returned them, or the model alone."""
    return model.__dict__.get("pipeline_stages", [model])


def tied_names(model: nn.Module) -> tuple[str, ...]:
    """Children that the first and the last stage both hold, as `split` found them."""
    names: tuple[str, ...] = model.__dict__.get("pipeline_tied", ())
    return names


def follow_mode(model: nn.Module) -> None:
    """Let views be in training or eval mode as the model is, whose `train()` does not know them."""
    for stage in stages_of(model):
        stage.training = model.training
        for child in stage.children():
            if isinstance(child._modules, _Children):
                child.training = model.training


def _ends(parts: Structure, stage: int, count: int) -> set[str]:
    """What a stage holds besides blocks."""
    return {*(parts.first if stage == 0 else ()), *(parts.last if stage == count - 1 else ())}


def _prune(model: nn.Module, parts: Structure, ends: set[str], blocks: set[str]) -> None:
    for name in parts.ends:
        if name not in ends:
            setattr(model, name, None)
    container: Any = model._modules[parts.container]
    for key in set(container._modules) - blocks:
        del container._modules[key]  # not `del container[key]`, which renumbers a ModuleList


class _Children(dict[str, Any]):
    """The children of a view; what is put in place of one is put into the whole model, too."""

    def __init__(self, whole: dict[str, Any], kept: dict[str, Any]) -> None:
        super().__init__(kept)
        self.whole = whole

    def __setitem__(self, name: str, child: Any) -> None:
        super().__setitem__(name, child)
        self.whole[name] = child


def _view(model: nn.Module, parts: Structure, ends: set[str], blocks: set[str]) -> nn.Module:
    mine = {key: block for key, block in blocks_by_key(model, parts).items() if key in blocks}
    container = _twin(getattr(model, parts.container), mine)
    absent = dict.fromkeys(set(parts.ends) - ends)
    return _twin(model, {**model._modules, **absent, parts.container: container})


def _twin(module: nn.Module, children: dict[str, Any]) -> nn.Module:
    """A module of the same class and attributes, with hooks of its own and other children."""
    twin = object.__new__(type(module))
    for name, value in module.__dict__.items():
        own = name.startswith("_") and name != "_buffers" and isinstance(value, dict | set)
        twin.__dict__[name] = value.copy() if own else value
    twin.__dict__["_modules"] = _Children(module._modules, children)
    return twin
