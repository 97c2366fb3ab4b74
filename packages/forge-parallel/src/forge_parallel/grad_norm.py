"""One gradient norm over all parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from forge_parallel._torch_compat import foreach_mul_, foreach_norm


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[Tensor], max_norm: float | None = None) -> Tensor:
    """Scale all gradients in place so that their global 2-norm is at most `max_norm`; return the norm.

    The norm is a 0-dim fp32 tensor on the gradients' device, taken before scaling, accumulated in
    fp32. `max_norm` None or inf only measures. A non-finite norm scales by itself: the update is
    poisoned rather than silently skipped, and the caller sees it in the result. Parameters without a
    gradient do not count; without any gradient the norm is 0.

    Gradients are plain tensors or DTensors on a mesh of one rank. No host sync, one pass to measure
    and one to scale. Raises ValueError for `max_norm` <= 0 or gradients sharded over several ranks.
    Usage: `norm = clip_grad_norm_(model.parameters(), 1.0)`.
    """
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"max_norm {max_norm} must be above 0; use 1.0, or None to measure only")
    gradients = [_local(p.grad) for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros(())
    # a norm per tensor in one fused launch, then the norm of the norms
    total = torch.linalg.vector_norm(torch.stack(foreach_norm(gradients)))
    if max_norm is not None and math.isfinite(max_norm):
        scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
        foreach_mul_(gradients, scale)
    return total


def _local(gradient: Tensor) -> Tensor:
    # duck-typed: importing torch.distributed.tensor costs half a second that fp32 runs do not need
    if not hasattr(gradient, "device_mesh"):
        return gradient
    if gradient.device_mesh.size() > 1:
        raise ValueError(
            f"a gradient is sharded over {gradient.device_mesh.size()} ranks and this norm is of one "
            "process; use a mesh of one rank"
        )
    return gradient.to_local()  # type: ignore[attr-defined]
