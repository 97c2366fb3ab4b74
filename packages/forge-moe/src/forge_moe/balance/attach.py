"""A loss whose gradient the backward pass adds, without being part of the caller's loss."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


class AttachLoss(Function):
    """The identity of y; backward also propagates `scale` times the gradient of `loss`.

    loss and scale are 0-dim tensors. The loss reaches the router under pipeline stages and recomputation
    too, where no caller sees its value.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        ctx.options = {"dtype": loss.dtype, "device": loss.device}
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (scale,) = ctx.saved_tensors
        return grad, torch.ones((), **ctx.options) * scale.to(**ctx.options), None
