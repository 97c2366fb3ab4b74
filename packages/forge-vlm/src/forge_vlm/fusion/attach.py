"""A loss whose gradient the backward pass adds, without being part of the caller's loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["attach"]


def attach(y: Tensor, loss: Tensor, scale: float) -> Tensor:
    """y itself; backward also propagates `scale` times the gradient of `loss` (0-dim).

    It reaches routers under recomputation and stages of a pipeline too, where no caller sees the loss.
    """
    out: Tensor = _Attach.apply(y, loss, scale)
    return out


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.options = scale, {"dtype": loss.dtype, "device": loss.device}
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, torch.full((), ctx.scale, **ctx.options), None
