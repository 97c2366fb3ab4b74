"""Checks of a model for a layout, before any change of it."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from forge_parallel._problems import merge_layers
from forge_parallel._shared.problems import Problem, problems_of, raise_problems
from forge_parallel.axes.context import attention_problems
from forge_parallel.axes.roles import Matched, cut_problems, find_roles
from forge_parallel.config import Layout, ParallelConfig
from forge_parallel.legal import Facts, problems
from forge_parallel.meshes import Meshes
from forge_parallel.pipeline.parts import blocks_by_key, part_problems, parts_of, stream_dim
from forge_parallel.structure import Structure, further_units, structure_of

__all__ = [
    "check_model",
    "facts_of",
    "model_problems",
    "ranks_with_other_values",
    "report_blocks",
]


def check_model(
    model: nn.Module,
    config: ParallelConfig,
    meshes: Meshes,
    structure: Structure,
    matched: Matched,
) -> None:
    """Raise one ValueError with every reason why this layout would compute `model` wrongly, or not at all."""
    layout = _layout(meshes)
    facts = facts_of(model, layout, structure, matched)
    found = problems(config, layout, facts)
    if meshes.dense is not None and not facts.obstacles.get("pp"):
        found += _shared_across_units(model, meshes, structure)
    if meshes.sparse is not None:
        found += _expert_problems(model, meshes, matched)
    raise_problems("", merge_layers(found))


def ranks_with_other_values(model: nn.Module, gather: Callable[[str], list[str]]) -> list[int]:
    """Ranks on which names or values of a full model differ from those of rank 0: sharding would mix them silently.

    `gather(value)` returns the values of all ranks. Costs a sha256 of all tensors, on the host.
    """
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        flat = tensor.detach().cpu().contiguous().flatten()
        digest.update(name.encode() + flat.view(torch.uint8).numpy().tobytes())
    digests = gather(digest.hexdigest())
    return [rank for rank, other in enumerate(digests) if other != digests[0]]


def model_problems(
    model: nn.Module, config: ParallelConfig, layout: Layout, **known: Any
) -> list[Problem]:
    """Why a whole model cannot run in a layout, found before any process group exists.

    known: further `Facts`, of its batch and its experts. Costs a walk over the modules; none where no axis shards the model.
    """
    if layout.pp * layout.cp * layout.tp * layout.ep == 1:
        return []
    try:
        matched = find_roles(model, cut=layout.tp > 1)
        facts = facts_of(model, layout, structure_of(model), matched)
        if layout.pp > 1 and not facts.obstacles["pp"]:
            stream_dim(model)
    except ValueError as error:
        return list(problems_of(error))
    return problems(config, layout, replace(facts, **known))


def facts_of(model: nn.Module, layout: Layout, structure: Structure, matched: Matched) -> Facts:
    """The facts of the model itself for this layout; nothing about its batch, nor about experts, which are sharded
    over ep before."""
    obstacles: dict[str, list[Problem]] = {}
    if layout.tp > 1:
        obstacles["tp"] = cut_problems(model, matched, layout.tp, layout.dp_shard * layout.cp)
    if layout.cp > 1:
        obstacles["cp"] = attention_problems(model)
    if layout.pp > 1:
        obstacles["pp"] = part_problems(model, structure)
    piped = layout.pp > 1 and not obstacles["pp"]
    return Facts(
        num_layers=len(blocks_by_key(model, structure)) if piped else None,
        num_blocks=len(structure.blocks),
        tied=structure.tied,
        first_blocks=structure.first_blocks,
        obstacles=obstacles,
        model=type(model).__name__,
    )


def _layout(meshes: Meshes) -> Layout:
    """The layout as far as rules read it: copies of the model (dp_replicate) count as one."""
    shards = 1 if meshes.dense is None else meshes.dense["dp_shard"].size()
    on_ep = meshes.sparse is not None and "ep" in meshes.sparse.mesh_dim_names
    ep = meshes.sparse["ep"].size() if on_ep else 1
    cp = meshes.cp.size
    return Layout(meshes.pp.size, 1, shards // cp, cp, meshes.tp.size, ep)


def report_blocks(
    model: nn.Module,
    config: ParallelConfig,
    meshes: Meshes,
    structure: Structure,
    report: Callable[[str], None] | None,
) -> None:
    """Report the chosen blocks if nobody named them, to `report` or as a warning on rank 0. Warn about a model without
    blocks, which FSDP2 gathers at once."""
    if structure.chosen and report is not None:
        report(structure.chosen)
    elif structure.chosen and not meshes.rank:
        warnings.warn(structure.chosen, stacklevel=3)
    sharded = meshes.dense is not None and meshes.fsdp(meshes.dense).size() > 1
    if not sharded or meshes.rank or structure.blocks:
        return
    size = sum(p.numel() for p in model.parameters()) / meshes.tp.size
    size *= 2 if config.precision == "bf16" else 4
    warnings.warn(
        f"{type(model).__name__} offers no blocks(), so FSDP2 gathers all of it at once on every rank, "
        f"{size / 1e9:.3g} GB in {config.precision}; give it blocks() that returns its layers, or name them "
        "with blocks=",
        stacklevel=3,
    )


def _shared_across_units(model: nn.Module, meshes: Meshes, structure: Structure) -> list[Problem]:
    """Tied parameters in several units of FSDP2, or several stages, each of which would get its own copy."""
    blocks = {id(unit) for unit in (*structure.modules(model), *further_units(model))}
    modules = model.named_modules(remove_duplicate=False)
    views: list[dict[str, object]] = [{n: id(m) for n, m in modules if id(m) in blocks}]
    if meshes.pp.size > 1:
        parts = parts_of(model, structure)
        ends: dict[str, object] = {n: end for end in ("first", "last") for n in getattr(parts, end)}
        keys = blocks_by_key(model, parts)
        views.append(ends | {f"{parts.container}.{key}": key for key in keys})
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    split_names = [
        same
        for same in names.values()
        if any(len({_value_of_owner(name, view) for name in same}) > 1 for view in views)
    ]
    if not split_names:
        return []
    (first, *others), more = split_names[0], ""
    if len(split_names) > 1:
        more = f" (so are those of {len(split_names) - 1} more)"
    rule = (
        f"and {' and '.join(others)} are one parameter{more}, and {type(model).__name__} holds it in several of its "
        "blocks and ends, each of which would get its own"
    )
    fix = "let one module outside of the blocks hold it, in a pipeline one that `first` and `last` name alike"
    return [Problem(first, "shared", ..., rule, fix)]


def _value_of_owner(parameter: str, values: Mapping[str, object]) -> object:
    """The value of the innermost module around a parameter that has one."""
    module = parameter
    while module:
        module = module.rpartition(".")[0]
        if module in values:
            return values[module]
    return None


def _expert_problems(model: nn.Module, meshes: Meshes, matched: Matched) -> list[Problem]:
    """Experts must be in modules of their own, and sharded over ep already."""
    parameters = dict(model.named_parameters())
    names = [name for name in matched.expert_parameters if name in parameters]
    axes = meshes.sparse.mesh_dim_names
    problems = []
    if "ep" in axes:
        whole = [n for n in names if "ep" not in _axes_of(parameters[n])]
        if whole or not names:
            other = f"{whole[0]} is not" if whole else "no parameter has the role expert"
            rule = f"must have experts that are sharded over it, and {other}"
            fix = "shard them first (forge_moe.expert_parallelize), or use ep = 1"
            problems.append(Problem("ep", "experts", meshes.sparse["ep"].size(), rule, fix))
    owners: dict[str, object] = {name.rpartition(".")[0]: name for name in names}
    known = set(names)
    for other in [n for n in parameters if n not in known]:
        if (expert := _value_of_owner(other, owners)) is not None:
            rule = f"and {other} are in one module, and experts are sharded apart from the rest"
            fix = "put them into a module of their own"
            problems.append(Problem(str(expert), "module", ..., rule, fix))
            break
    return problems


def _axes_of(parameter: Any) -> tuple[str, ...]:
    mesh = getattr(parameter, "device_mesh", None)
    return () if mesh is None else tuple(mesh.mesh_dim_names or ())
