"""What a model must be like for a layout, asked before anything of it is changed."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from forge_parallel._rules import once
from forge_parallel.axes.fsdp import blocks_of
from forge_parallel.axes.roles import dropout_problems, role_names
from forge_parallel.config import ParallelConfig
from forge_parallel.meshes import Meshes
from forge_parallel.pipeline.parts import blocks_by_key, parts_of


def check_model(
    model: nn.Module, config: ParallelConfig, meshes: Meshes, roles: Mapping[str, Any] | None
) -> None:
    """One ValueError with everything about `model` that this layout would compute wrongly, or not at all."""
    problems = []
    if config.recompute != "none" and not blocks_of(model):
        problems.append(
            f"recompute {config.recompute} must have blocks to keep the inputs of, and "
            f"{type(model).__name__} offers none; give it blocks() that returns them, or use recompute = 'none'"
        )
    if meshes.dense is not None:
        problems += _shared(model, meshes)
    if meshes.sparse is not None:
        problems += _experts_apart(model, meshes, roles)
    if meshes.tp.size > 1:
        problems += dropout_problems(model)
    if problems:
        raise ValueError(once(problems))


def warn_of_one_unit(model: nn.Module, config: ParallelConfig, meshes: Meshes) -> None:
    """A warning on rank 0 where FSDP2 would gather the whole model at once, for want of blocks."""
    spread = meshes.dense is not None and meshes.fsdp(meshes.dense).size() > 1
    if not spread or meshes.rank or blocks_of(model):
        return
    size = sum(p.numel() for p in model.parameters()) / meshes.tp.size
    size *= 2 if config.precision == "bf16" else 4
    warnings.warn(
        f"{type(model).__name__} offers no blocks(), so FSDP2 gathers all of it at once on every rank, "
        f"{size / 1e9:.3g} GB in {config.precision}; give it blocks() that returns its layers",
        stacklevel=3,
    )


def expert_names(model: nn.Module, roles: Mapping[str, Any] | None) -> list[str]:
    """Names of the parameters with the role `expert`."""
    patterns = [pattern for pattern, role in role_names(model, roles).items() if role == "expert"]
    return [n for n, _ in model.named_parameters() if any(fnmatchcase(n, p) for p in patterns)]


def _shared(model: nn.Module, meshes: Meshes) -> list[str]:
    """Parameters under several names that would become several: in units of FSDP2, or in stages."""
    blocks = {id(block) for block in blocks_of(model)}
    modules = model.named_modules(remove_duplicate=False)
    views: list[dict[str, object]] = [{n: id(m) for n, m in modules if id(m) in blocks}]
    if meshes.pp.size > 1:
        parts = parts_of(model)
        ends: dict[str, object] = {n: end for end in ("first", "last") for n in getattr(parts, end)}
        views.append(ends | {f"{parts.blocks}.{key}": key for key in blocks_by_key(model, parts)})
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    apart = [
        same
        for same in names.values()
        if any(len({_place(name, view) for name in same}) > 1 for view in views)
    ]
    if not apart:
        return []
    more = f" (so are those of {len(apart) - 1} more)" if len(apart) > 1 else ""
    return [
        f"{' and '.join(apart[0])}: are one parameter{more}, and {type(model).__name__} holds it in several of "
        "its blocks and ends, each of which would get its own; let one module outside of the blocks hold it, in "
        "a pipeline one that `first` and `last` name alike"
    ]


def _place(parameter: str, places: Mapping[str, object]) -> object:
    """The place of the innermost module around a parameter that has one."""
    module = parameter
    while module:
        module = module.rpartition(".")[0]
        if module in places:
            return places[module]
    return None


def _experts_apart(model: nn.Module, meshes: Meshes, roles: Mapping[str, Any] | None) -> list[str]:
    """Experts lie in modules of their own, and over the ranks of ep already."""
    parameters = dict(model.named_parameters())
    names = expert_names(model, roles)
    axes = meshes.sparse.mesh_dim_names
    problems = []
    if "ep" in axes:
        whole = [n for n in names if "ep" not in _axes_of(parameters[n])]
        if whole or not names:
            problems.append(
                f"ep {meshes.sparse['ep'].size()} must have experts that lie on its ranks, and "
                f"{whole[0] + ' does not' if whole else 'no parameter has the role expert'}; spread them first "
                "(forge_moe.expert_parallelize), or use ep = 1"
            )
    owners: dict[str, object] = {name.rpartition(".")[0]: name for name in names}
    known = set(names)
    for other in [n for n in parameters if n not in known]:
        if (expert := _place(other, owners)) is not None:
            problems.append(
                f"{expert} and {other}: lie in one module, and experts are laid out apart from the rest; put them "
                "into a module of their own"
            )
            break
    return problems


def _axes_of(parameter: Any) -> tuple[str, ...]:
    mesh = getattr(parameter, "device_mesh", None)
    return () if mesh is None else tuple(mesh.mesh_dim_names or ())
