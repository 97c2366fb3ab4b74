"""A loss that adds its gradient on the way back, without being part of the caller's loss."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


class AttachLoss(Function):
    """y unchanged; backward adds `scale` times the gradient of `loss` to what flows through y.

    loss and scale are 0-dim tensors.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        ctx.kind = {"dtype": loss.dtype, "device": loss.device}
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (scale,) = ctx.saved_tensors
        return grad, torch.ones((), **ctx.kind) * scale.to(**ctx.kind), None
