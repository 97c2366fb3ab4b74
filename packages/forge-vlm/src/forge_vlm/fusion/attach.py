"""A loss whose gradient the backward pass adds, without being part of the caller's loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["attach"]


def attach(y: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
    """y itself; backward also propagates `scale` times the gradient of `loss`, both 0-dim.

    It reaches routers under recomputation and stages of a pipeline too, where no caller sees the loss.
    """
    out: Tensor = _Attach.apply(y, loss, scale)
    return out


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        ctx.options = {"dtype": loss.dtype, "device": loss.device}
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (scale,) = ctx.saved_tensors
        return grad, scale.to(**ctx.options, copy=True), None
