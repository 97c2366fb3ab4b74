"""Norms by name: RMSNorm with weights around 1 or around 0, and LayerNorm.

Shapes: D width of the last dim, ... any leading dims.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from forge_core._shared.module_arguments import factory_arguments
from forge_core._torch_compat import takes_kernel
from forge_core.kinds import ParameterKind
from forge_core.registry import Registry

if TYPE_CHECKING:
    from forge_core.model.config import TransformerConfig


def _normalized(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x / rms(x) * weight (..., D) in the dtype of x, and 1 / rms (..., 1) in fp32."""
    wide = x if x.dtype == torch.float64 else x.float()
    # one pass without a tensor of squares
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
        out, scale = _normalized(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[no-untyped-def]
        x, weight, scale = ctx.saved_tensors
        unit = x * scale  # (..., D)
        grad = grad.to(unit.dtype)
        product = grad * unit  # (..., D)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = product.flatten(0, -2).sum(0).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            flat = product.flatten(0, -2)  # mv, which autocast leaves in fp32, and not @
            along = flat.mv(weight.to(unit.dtype)).div_(-x.size(-1)).view_as(scale)  # (..., 1)
            grad_x = torch.mul(grad, weight).addcmul_(unit, along).mul_(scale).to(x.dtype)
        return grad_x, grad_weight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight (D,) of x (..., D), in fp32; result in the dtype of x."""
    if x.device.type == "cpu" and type(x) is Tensor and not torch.compiler.is_compiling():
        if not torch.is_grad_enabled():  # decoding: an autograd function's own cost counts there
            return _normalized(x, weight, eps)[0]
        return _CpuRMSNorm.apply(x, weight, eps)
    if x.dtype != weight.dtype and takes_kernel(x):
        return _by_kernel(x, weight, eps, 0.0)
    return F.rms_norm(x, weight.shape, weight, eps).to(x.dtype)


def _by_kernel(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    from forge_core.model.norm_kernel import RMSNormByKernel  # Triton, which a CPU build lacks

    return RMSNormByKernel.apply(x, weight, eps, offset)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dim, in fp32, result in the dtype of x (Zhang & Sennrich 2019).

        RMSNorm(dim, eps=1e-5)(x)   # (..., D) -> (..., D)

    `mean_over_ranks(sums)` is set where the last dim is sharded over ranks: it returns the mean of squares (..., 1) over
    all ranks, from this rank's sums (..., 1).
    """

    mean_over_ranks: Callable[[Tensor], Tensor] | None = None

    @factory_arguments
    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the initial values, also after `to_empty`."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self._normalize(x, self.weight)

    def _normalize(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.mean_over_ranks is None:
            return rms_norm(x, weight, self.eps)
        wide = x if x.dtype == torch.float64 else x.float()
        # squares are summed here and averaged over ranks: the last dim is sharded
        mean = self.mean_over_ranks(wide.square().sum(-1, keepdim=True))  # (..., 1)
        return (wide * (mean + self.eps).rsqrt() * weight).to(x.dtype)

    def parameter_kinds(self) -> dict[str, ParameterKind]:
        """Kind of its parameter; see `forge_core.kinds`."""
        return {"weight": "norm"}

    def extra_repr(self) -> str:
        return f"{self.weight.size(0)}, eps={self.eps}"


class PlusOneRMSNorm(RMSNorm):
    """x / rms(x) * (1 + weight): weights begin at 0, where 16 bits are finer (Gemma).

    PlusOneRMSNorm(dim, eps=1e-6)(x)   # (..., D) -> (..., D)
    """

    def reset_parameters(self) -> None:
        """Set the initial values, also after `to_empty`."""
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        if self.mean_over_ranks is None and takes_kernel(x):
            return _by_kernel(x, self.weight, self.eps, 1.0)
        # in fp32: next to 1 a bf16 weight below 2^-8 would vanish
        weight = 1.0 + self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
        return self._normalize(x, weight)

    def init_table(self, std: float, residual_std: float) -> dict[str, tuple[str, float]]:
        """Initial value of the weight; see `Init`."""
        return {"weight": ("constant", 0.0)}


NORMS = Registry(
    "model.norm",
    "forge.norms",
    ("dim", "eps"),
    {"rms_norm": RMSNorm, "layer_norm": nn.LayerNorm, "rms_norm_plus_one": PlusOneRMSNorm},
)


def build_norm(config: TransformerConfig) -> nn.Module:
    """Build the norm over the last dim that a config names."""
    return NORMS.find(config.norm)(config.dim, config.norm_eps, **config.norm_options)


def build_head_norm(config: TransformerConfig, width: int) -> RMSNorm:
    """Build the norm of queries or keys over `width`: RMSNorm, with weights around 0 if the config's norm has them."""
    kind = PlusOneRMSNorm if config.norm == "rms_norm_plus_one" else RMSNorm
    return kind(width, config.norm_eps)
