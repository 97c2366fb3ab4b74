"""The label count that losses are divided by, and one gradient norm over all parameters and ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from forge_parallel._shared.problems import invalid
from forge_parallel._shared.shards import local_tensor
from forge_parallel._torch_compat import foreach_mul_, foreach_norm

if TYPE_CHECKING:
    from forge_parallel.meshes import Meshes


def global_count(num_valid: float, meshes: Meshes) -> Tensor:
    """Labels of the global batch, or the sum of their weights; 1 where that is zero: 0-dim fp32 on the
    device, equal on all ranks.

    `num_valid` counts labels of the sequences that this rank reads, over all micro-batches and before cp shards them; of
    the ranks that read the same sequences only one is added (`meshes.is_batch_leader`). A sum of token losses divided
    by it gives the gradient of one mean over the step, however labels are distributed over ranks and
    micro-batches. Cost: one all-reduce of one float64, no host sync.
    Usage: `loss = loss_sum / global_count(n, meshes)`. forge-train sends the same count with its votes.
    """
    count = torch.tensor(num_valid if meshes.is_batch_leader else 0, dtype=torch.float64)
    if meshes.device.type == "cuda":
        # a copy from pageable memory would wait for the device
        count = count.pin_memory().to(meshes.device, non_blocking=True)
    if meshes.world_size > 1:
        dist.all_reduce(count)
    # not clamp(min=1), which would rescale small sums of weights
    return count.masked_fill(count == 0, 1).float()


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor],
    max_norm: float | None = None,
    *,
    norm_type: float = 2.0,
    group: Any = None,
) -> Tensor:
    """Scale all gradients in place so that their global norm is at most `max_norm`; return the norm.

    `global_grad_norm` followed by `clip_grads_`; see there. `max_norm` None or inf only measures.
    Usage: `norm = clip_grad_norm_(model.parameters(), 1.0)`.
    """
    _require_positive(max_norm)
    parameters = list(parameters)
    norm, _ = global_grad_norm(parameters, norm_type, group=group)
    clip_grads_(parameters, norm, max_norm)
    return norm


@torch.no_grad()
def global_grad_norm(
    parameters: Iterable[Tensor],
    norm_type: float = 2.0,
    sums: Tensor | None = None,
    group: Any = None,
) -> tuple[Tensor, Tensor | None]:
    """(norm over the gradients of all ranks, `sums` summed over all ranks), equal bits on each rank.

    The norm is a 0-dim fp32 tensor. Gradients are DTensors on any meshes, or plain tensors that every
    rank of `group` (default: the default process group) holds alike; what several ranks hold counts
    once. A parameter without a gradient does not count. `sums` (n,) travels in the same collective: a rank's
    summand of the loss, say, is returned as the loss of the global batch.

    Local norms are taken in fp32, combined in fp64. No host sync. Cost: one pass over the gradients
    and one all-reduce of 1 + n numbers over `group`; with `norm_type` inf and `sums` two of them; on
    one rank none. Raises ValueError for a norm other than 2 and inf, and for a gradient that is still
    a partial sum.
    """
    if norm_type not in (2.0, math.inf):
        raise invalid("norm_type", "unknown", norm_type, "must be 2 or inf", "use 2.0")
    gradients = [p.grad for p in parameters if p.grad is not None]
    device = _device_of(gradients, sums, group)
    local = local_norm(gradients, norm_type, device, group)
    extra = torch.zeros(0, device=device) if sums is None else sums.detach().to(device)
    many = dist.is_initialized() and dist.get_world_size(group) > 1

    # a maximum and the sums cannot be in one reduction
    if norm_type == math.inf:
        both = extra.double()
        if many:
            # a maximum over ranks may lose a NaN, so it travels as a number of its own
            nan = local.isnan()
            largest = torch.stack([local.masked_fill(nan, 0.0), nan.double()])
            dist.all_reduce(largest, dist.ReduceOp.MAX, group)
            local = largest[0].masked_fill(largest[1] > 0, math.nan)
            if sums is not None:
                dist.all_reduce(both, group=group)
        return local.float(), None if sums is None else both.to(extra.dtype)
    # squares of the norm and `sums` in one all-reduce of fp64
    both = torch.cat([local.reshape(1), extra.double()])
    if many:
        dist.all_reduce(both, group=group)
    return both[0].sqrt().float(), None if sums is None else both[1:].to(extra.dtype)


@torch.no_grad()
def clip_grads_(parameters: Iterable[Tensor], norm: Tensor, max_norm: float | None) -> None:
    """Multiply all gradients in place by min(1, max_norm / (norm + 1e-6)); None or inf: do nothing.

    A norm that is not finite makes all gradients so, and the caller sees it in the norm: it masks the step, or stops. No host sync, but one with gradients on the host of an accelerator. Raises
    ValueError for `max_norm` <= 0.
    """
    _require_positive(max_norm)
    if max_norm is None or not math.isfinite(max_norm):
        return
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # 1e-6 as in torch.nn.utils.clip_grad_norm_
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in (p.grad for p in parameters if p.grad is not None):
        local = local_tensor(gradient)
        by_device.setdefault(local.device, []).append(local)
    for device, gradients in by_device.items():
        # to a host the copy must have arrived before it is read: with CPU offload one sync
        foreach_mul_(gradients, scale.to(device, non_blocking=device.type == "cuda"))


def local_norm(
    gradients: list[Tensor], norm_type: float, device: torch.device, group: Any = None
) -> Tensor:
    """This rank's summand of the squared norm, fp64, where a gradient of n ranks counts 1 / n; or the maximum norm."""
    by_kind: dict[tuple[torch.device, int], list[Tensor]] = {}
    for gradient in gradients:
        local = local_tensor(gradient)
        if local.numel():
            by_kind.setdefault((local.device, _replicas(gradient, group)), []).append(local)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for (_, replicas), tensors in by_kind.items():
        # a norm per tensor in one fused launch, then the norms together
        norms = torch.stack(foreach_norm(tensors, norm_type)).double()
        more = norms.square().sum() / replicas if norm_type == 2.0 else norms.max()
        more = more.to(device, non_blocking=True)
        total = total + more if norm_type == 2.0 else torch.maximum(total, more)
    return total


def _replicas(gradient: Tensor, group: Any) -> int:
    """Number of ranks of the group that hold the same gradient."""
    # duck-typed: importing torch.distributed.tensor costs half a second that fp32 runs do not need
    mesh = getattr(gradient, "device_mesh", None)
    if mesh is None:
        return dist.get_world_size(group) if dist.is_initialized() else 1
    replicas = 1
    for dim, placement in enumerate(gradient.placements):  # type: ignore[attr-defined]
        if placement.is_partial():
            placements = tuple(gradient.placements)  # type: ignore[attr-defined]
            rule = "are those of a sum that was never made"
            fix = "reduce the gradient over its mesh first"
            raise invalid("placements", "partial", placements, rule, fix)
        replicas *= mesh.size(dim) if placement.is_replicate() else 1
    return replicas


def _device_of(gradients: list[Tensor], sums: Tensor | None, group: Any) -> torch.device:
    """Where the collective runs: with `sums`, else with the mesh, else with the gradients."""
    if sums is not None:
        return sums.device
    for gradient in gradients:
        mesh = getattr(gradient, "device_mesh", None)
        if mesh is None or mesh.device_type == gradient.device.type:
            return gradient.device
        return torch.device(mesh.device_type, torch.cuda.current_device())  # CPU offload
    if dist.is_initialized() and dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _require_positive(max_norm: float | None) -> None:
    """Raise ValueError for a `max_norm` that is not above 0."""
    if max_norm is not None and not max_norm > 0:
        fix = "use 1.0, or None to measure only"
        raise invalid("max_norm", "range", max_norm, "must be above 0", fix)
