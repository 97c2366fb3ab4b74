"""RMSNorm and LayerNorm.

Shapes: D width of the last dim, ... any leading dims.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from forge_core.model.config import TransformerConfig
from forge_core.registry import Registry


def _normalised(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(..., D) -> the norm in the dtype of x, and 1 / rms (..., 1) in fp32."""
    wide = x if x.dtype == torch.float64 else x.float()
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = norm.square_().div_(x.size(-1)).add_(eps).rsqrt_()  # (..., 1)
    return (wide * scale).mul_(weight).to(x.dtype), scale


class _CpuRMSNorm(torch.autograd.Function):
    """RMSNorm in fp32 with few passes over memory.

    Torch 2.13 has no fused kernel on the CPU: `F.rms_norm` is a chain of ops there, 5 times slower
    forward and backward than this (fp32, 2048 x 256). Same formula, same precision.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:  # type: ignore[no-untyped-def]
        out, scale = _normalised(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[no-untyped-def]
        x, weight, scale = ctx.saved_tensors
        unit = x * scale  # (..., D)
        grad = grad.to(unit.dtype)
        product = grad * unit
        grad_x = grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = product.flatten(0, -2).sum(0).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            flat = product.flatten(0, -2)  # mv, which autocast leaves in fp32, and not @
            along = flat.mv(weight.to(unit.dtype)).div_(-x.size(-1)).view_as(scale)  # (..., 1)
            grad_x = torch.mul(grad, weight).addcmul_(unit, along).mul_(scale).to(x.dtype)
        return grad_x, grad_weight, None


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dim, in fp32, result in the dtype of x (Zhang & Sennrich 2019).

    RMSNorm(dim, eps=1e-5)(x)   # (..., D) -> (..., D)
    """

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" and type(x) is Tensor and not torch.compiler.is_compiling():
            if (
                not torch.is_grad_enabled()
            ):  # decoding: an autograd function's own cost counts there
                return _normalised(x, self.weight, self.eps)[0]
            out: Tensor = _CpuRMSNorm.apply(x, self.weight, self.eps)
            return out
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.size(0)}, eps={self.eps}"


NORMS = Registry(
    "model.norm", "forge.norms", ("dim", "eps"), {"rms_norm": RMSNorm, "layer_norm": nn.LayerNorm}
)


def build_norm(config: TransformerConfig) -> nn.Module:
    """The norm over the last dim that a config names."""
    norm: nn.Module = NORMS.find(config.norm)(config.dim, config.norm_eps, **config.norm_options)
    return norm
