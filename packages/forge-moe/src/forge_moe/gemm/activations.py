"""Activations of experts without a gate matrix of their own, each with its derivative.

Shapes: R rows, F width inside an expert.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from forge_moe._torch_compat import is_clamped


class Gelu(NamedTuple):
    """The exact GELU: (R, F) -> (R, F)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x)

    def backward(self, grad: Tensor, x: Tensor) -> Tensor:
        """The gradient of x (R, F) from that of the output."""
        return torch.ops.aten.gelu_backward(grad, x)


class ClampedSwiGLU(NamedTuple):
    """(up + 1) * gate * sigmoid(alpha * gate) with gate at most `limit` and up within it (gpt-oss, 2025).

    (R, 2 F) -> (R, F): columns are gate and up in turns, as products with one matrix give them. Where a value is
    clamped it has no gradient, as in autograd of the installed torch.
    """

    alpha: float
    limit: float

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self._clamped(x)
        return (up + 1) * gate * torch.sigmoid(self.alpha * gate)

    def backward(self, grad: Tensor, x: Tensor) -> Tensor:
        """The gradient of x (R, 2 F) from that of the output (R, F); holds about six buffers of (R, F)."""
        gate, up = self._clamped(x)
        share = torch.sigmoid(self.alpha * gate)
        slope = share * (1 + self.alpha * gate * (1 - share))  # of gate * sigmoid(alpha * gate)
        of_gate = grad * (up + 1) * slope
        of_up = grad * gate * share
        raw_gate, raw_up = x[..., ::2], x[..., 1::2]
        of_gate = of_gate.masked_fill(is_clamped(raw_gate, self.limit), 0.0)
        of_up = of_up.masked_fill(is_clamped(raw_up.abs(), self.limit), 0.0)
        return torch.stack((of_gate, of_up), dim=-1).flatten(-2)

    def _clamped(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x[..., ::2].clamp(max=self.limit), x[..., 1::2].clamp(-self.limit, self.limit)


Activation = Gelu | ClampedSwiGLU
