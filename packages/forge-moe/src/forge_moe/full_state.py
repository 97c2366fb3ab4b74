"""Load full tensors into a model with sharded experts, for loops without forge-ckpt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from forge_moe._shared.problems import Problem, raise_problems


@torch.no_grad()
def load_full_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy `state`, full tensors of all experts, into `model`; each rank takes its own shard.

        expert_parallelize(model, mesh["ep"])
        load_full_state(model, torch.load("model.pt", weights_only=True))

    `state` has a tensor for each name of `model.state_dict()`, of the global shape; values are cast to the
    model's dtype. No communication: every rank passes, and holds, the full state. Raises ValueError with a
    line for each name that is missing, unknown or of another shape, before anything is changed; also for
    parameters on the meta device (`model.to_empty` allocates them), and for those that FSDP has sharded
    again: load before `fully_shard`.
    """
    targets: dict[str, Any] = model.state_dict()
    names = sorted(targets.keys() | state.keys())
    problems = [problem for name in names for problem in _problems(name, targets, state)]
    raise_problems("load_full_state", problems)
    for name, target in targets.items():
        if isinstance(target, Tensor):
            _local(target).copy_(_shard(state[name], target))


def _problems(name: str, targets: Mapping[str, Any], state: Mapping[str, Any]) -> Iterator[Problem]:
    """The first rule that the tensor `name` breaks."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    target, value = targets.get(name), state.get(name)
    if name not in state:
        yield Problem(name, "missing", ..., "is missing", "save the full model")
    elif name not in targets:
        yield Problem(name, "unknown", ..., "is unknown", "leave it out")
    elif not isinstance(target, Tensor):
        yield Problem(name, "extra", ..., "is extra state, not a tensor", "use load_state_dict")
    elif not isinstance(value, Tensor) or isinstance(value, DTensor):
        kind = type(value).__name__
        yield Problem(name, "type", kind, "must be a plain tensor", "give the full tensor")
    elif value.shape != target.shape:
        rule, fix = f"must be {tuple(target.shape)}", "give all experts of this model"
        yield Problem(name, "shape", tuple(value.shape), rule, fix)
    elif target.is_meta:
        fix = "call model.to_empty(device=...) before"
        yield Problem(name, "meta", ..., "is on the meta device", fix)
    # FSDP on a mesh axis of experts' DTensors uses a placement class of its own (strided shards).
    elif any(type(p) not in (Shard, Replicate) for p in getattr(target, "placements", ())):
        rule = f"is sharded by {target.placements}"  # type: ignore[attr-defined]
        yield Problem(name, "fsdp", ..., rule, "load before fully_shard")


def _shard(full: Tensor, target: Any) -> Tensor:
    """This rank's shard of a full tensor, by the placements of `target`."""
    for axis, placement in enumerate(getattr(target, "placements", ())):
        if placement.is_shard():
            mesh, dim = target.device_mesh, placement.dim
            parts, rank = full.chunk(mesh.size(axis), dim), mesh.get_local_rank(axis)
            full = parts[rank] if rank < len(parts) else full.narrow(dim, 0, 0)
    return full


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local
