"""What kernels of attention on GPUs compute, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def flash_gradients(
    weights: Tensor, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q (S, H, D) and of k and v (S, K, D), from the weights (H, S, S) of the forward and its output."""
    keys, values = (t.repeat_interleave(q.size(1) // t.size(1), 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", grad, values) - (grad * out).sum(-1).t().unsqueeze(-1)
    scores = weights * scores * scale
    dk = torch.einsum("hqk,qhd->khd", scores, q), torch.einsum("hqk,qhd->khd", weights, grad)
    folded = (t.unflatten(1, (k.size(1), -1)).sum(2) for t in dk)
    return torch.einsum("hqk,khd->qhd", scores, keys), *folded
