"""Cross-entropy from hidden states and the head's weight, without the logits of all tokens.

Shapes: N tokens (all leading dims flattened), R rows of one block, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forge_core.loss.token import TokenLoss, check_weights

# Elements of one block of logits: 32 MB in fp32, large enough that its products run at full speed.
_BLOCK = 2**23


def fused_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    ignore_index: int = -100,
    *,
    weights: Tensor | None = None,
) -> TokenLoss:
    """`cross_entropy(x @ weight.T, labels, weights=weights)` block by block: x (..., D), weight (V, D), labels
    and weights (...).

        model(tokens, then=lambda x, weight: fused_cross_entropy(x, weight, labels).sum)

    The whole vocabulary must be in `weight`. Logits have the dtype of x, their softmax is in fp32, and the
    gradient of the weight is summed over blocks in fp32. First derivatives only.

    Raises ValueError when shapes do not fit.
    Cost: keeps x and labels instead of (N, V) logits; the backward multiplies by the weight once more (a
    third of the head's work on top); no host sync.
    """
    if x.shape[:-1] != labels.shape or weight.ndim != 2 or x.size(-1) != weight.size(1):
        raise ValueError(
            f"labels {tuple(labels.shape)} must have the shape of x {tuple(x.shape)} without its last dim, which "
            f"is that of weight {tuple(weight.shape)}; shift tokens and labels by slicing"
        )
    check_weights(weights, labels)
    flat = labels.reshape(-1).to(torch.int64)  # (N,)
    valid = flat != ignore_index
    flat_weights, count = None, valid.sum()
    if weights is not None:
        flat_weights = weights.reshape(-1).float().where(valid, 0.0)  # (N,)
        count = flat_weights.double().sum()
    total: Tensor = _Fused.apply(x.reshape(-1, x.size(-1)), weight, flat, valid, flat_weights)
    return TokenLoss(sum=total, count=count)


class _Fused(torch.autograd.Function):
    """(N, D), (V, D), (N,) labels, (N,) bool, (N,) fp32 or None -> 0-dim fp32 sum."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        valid: Tensor,
        weights: Tensor | None,
    ) -> Tensor:
        target = labels.where(valid, 0)[:, None]  # (N, 1)
        ctx.save_for_backward(x, weight, target, valid, weights)
        losses = torch.empty(len(x), dtype=torch.float32, device=x.device)  # (N,)
        for rows in _blocks(x, weight):
            log_p = F.log_softmax(F.linear(x[rows], weight), dim=-1, dtype=torch.float32)  # (R, V)
            losses[rows] = log_p.gather(1, target[rows])[:, 0]
            del log_p  # or it would stand beside the next block
        losses = losses.where(valid, 0.0)
        return (losses if weights is None else losses * weights).sum().neg()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x, weight, target, valid, weights = ctx.saved_tensors
        scale = grads[0] * (valid if weights is None else weights)[:, None]  # (N, 1)
        grad_x = torch.empty_like(x)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for rows in _blocks(x, weight):
            p = torch.softmax(F.linear(x[rows], weight), dim=-1, dtype=torch.float32)  # (R, V)
            p.mul_(scale[rows]).scatter_add_(1, target[rows], -scale[rows])
            slope = p.to(x.dtype)
            grad_x[rows] = slope @ weight
            grad_weight += slope.mT @ x[rows]
            del p, slope
        return grad_x, grad_weight.to(weight.dtype), None, None, None


def _blocks(x: Tensor, weight: Tensor) -> Iterator[slice]:
    rows = max(1, _BLOCK // len(weight))
    return (slice(start, start + rows) for start in range(0, len(x), rows))
