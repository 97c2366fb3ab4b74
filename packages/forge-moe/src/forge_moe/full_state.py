"""Load full tensors into a model with sharded experts, for loops without forge-ckpt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


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
    problems = [f"{name} is missing; save the full model" for name in targets.keys() - state.keys()]
    problems += [f"{name} is unknown; leave it out" for name in state.keys() - targets.keys()]
    for name in targets.keys() & state.keys():
        problems += _problems(name, targets[name], state[name])
    if problems:
        raise ValueError("\n".join(f"load_full_state: {text}" for text in sorted(problems)))
    for name, target in targets.items():
        if isinstance(target, Tensor):
            _local(target).copy_(_shard(state[name], target))


def _problems(name: str, target: Any, value: Any) -> list[str]:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if not isinstance(target, Tensor):
        return [f"{name} is extra state, not a tensor; use load_state_dict for it"]
    if not isinstance(value, Tensor) or isinstance(value, DTensor):
        return [
            f"{name} is a {type(value).__name__} and must be a plain tensor; give the full tensor"
        ]
    if value.shape != target.shape:
        return [
            f"{name} {tuple(value.shape)} must be {tuple(target.shape)}; give all experts, of this model"
        ]
    if target.is_meta:
        return [f"{name} is on the meta device; call model.to_empty(device=...) before"]
    # FSDP on a mesh axis of experts' DTensors uses a placement class of its own (strided shards).
    if isinstance(target, DTensor) and any(
        type(p) not in (Shard, Replicate) for p in target.placements
    ):
        return [f"{name} is sharded by {target.placements}; load before fully_shard"]
    return []


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
