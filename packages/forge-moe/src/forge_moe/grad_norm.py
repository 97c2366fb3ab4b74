"""The gradient norm of a model with sharded experts, for loops without forge-parallel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge_moe._shared.problems import invalid

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@torch.no_grad()
def expert_grad_norm(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """2-norm of all gradients of `model`, equal to that of one process; 0-dim fp32, the same bits on each rank.

        norm = expert_grad_norm(model, mesh["ep"])      # after the dense gradients were summed over ranks
        nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm, foreach=False)
        optimizer.step()

    `mesh` is the one given to `expert_parallelize`. Gradients that are DTensors (experts, FSDP's) are summed over
    their meshes, and replicated values count once. Plain gradients must be the same on every rank, as after
    DDP or an all-reduce; local ones give a wrong norm. torch's own
    `clip_grad_norm_` refuses such a mixture of plain tensors and DTensors.

    Sums are fp64. Costs one all-reduce of a number per axis of each mesh, no host sync. Raises ValueError
    for a model without experts on `mesh`, and for a gradient that is still a partial sum.
    """
    from torch.distributed.tensor import DTensor

    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    sharded = {n: p for n, p in model.named_parameters() if isinstance(p, DTensor)}
    axis = getattr(mesh, "mesh_dim_names", None) or ()
    if not any(set(axis) <= set(p.device_mesh.mesh_dim_names or ()) for p in sharded.values()):
        fix = "pass the mesh given to expert_parallelize"
        raise invalid("mesh", "missing", mesh, "has no experts of the model", fix)
    # Squares are summed per mesh first: one all-reduce per mesh axis, not per parameter.
    squares: dict[DeviceMesh, Tensor] = {}
    total = torch.zeros((), dtype=torch.float64, device=next(iter(sharded.values())).device)
    for name, gradient in gradients.items():
        if not isinstance(gradient, DTensor):
            total += gradient.double().square().sum()
            continue
        if any(placement.is_partial() for placement in gradient.placements):
            raise invalid(name, "partial", ..., "has a partial sum as gradient", "reduce it before")
        local = gradient.to_local().double().square().sum() / _copies(gradient)
        before = squares.get(gradient.device_mesh)
        squares[gradient.device_mesh] = local if before is None else before + local
    for owner, part in squares.items():
        for dim in range(owner.ndim):
            dist.all_reduce(part, group=owner.get_group(dim))
        total += part
    return total.sqrt().float()


def _copies(gradient: Tensor) -> int:
    """Number of ranks of its mesh that hold the same values of a DTensor."""
    copies = 1
    for axis, placement in enumerate(gradient.placements):  # type: ignore[attr-defined]
        copies *= gradient.device_mesh.size(axis) if placement.is_replicate() else 1  # type: ignore[attr-defined]
    return copies
