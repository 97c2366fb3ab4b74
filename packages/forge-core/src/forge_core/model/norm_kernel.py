"""RMSNorm of 16-bit tensors with a weight in fp32, or weights around 0: one Triton kernel forward, two kernels backward.

torch's fused kernel takes a weight of the input's dtype only, and 1 + weight in 16 bits would lose the weight.
Imported only where torch finds Triton and a GPU. R rows, D width.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge_core._torch_compat import on_device_of

#: Programs of the backward, each of which sums the weight's gradient over its rows: a number that no device changes.
_PROGRAMS = 1024


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _forward(x, weight, out, scales, width, eps, offset, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    factor = offset + tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)

    scale = 1.0 / tl.sqrt(tl.sum(value * value) / width + eps)
    tl.store(scales + row, scale)
    result = (value * scale * factor).to(out.dtype.element_ty)
    tl.store(out + row * width + column, result, mask=inside)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _backward(x, weight, scales, grad, grad_x, sums, rows, width, offset, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    first = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    factor = offset + tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)

    row = first.to(tl.int64)
    while row < rows:
        index = row * width + column
        scale = tl.load(scales + row)
        unit = tl.load(x + index, mask=inside, other=0.0).to(tl.float32) * scale
        upstream = tl.load(grad + index, mask=inside, other=0.0).to(tl.float32)

        weighted = upstream * factor
        along = tl.sum(weighted * unit) / width
        result = (weighted - unit * along) * scale
        tl.store(grad_x + index, result.to(grad_x.dtype.element_ty), mask=inside)

        total += upstream * unit
        row += tl.num_programs(0)
    tl.store(sums + first.to(tl.int64) * width + column, total, mask=inside)


class RMSNormByKernel(torch.autograd.Function):
    """x / rms(x) * (offset + weight): x (..., D) and weight (D,) -> like x, computed in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        x, width = x.contiguous(), x.size(-1)
        out = torch.empty_like(x)
        scales = x.new_empty(x.numel() // width, dtype=torch.float32)
        if len(scales):
            given = x, weight, out, scales, width, eps, offset
            with on_device_of(x):
                _forward[(len(scales),)](*given, **_options(width))
        ctx.offset = offset
        ctx.save_for_backward(x, weight, scales)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, scales = ctx.saved_tensors
        grad, width, grad_x = grad.contiguous(), x.size(-1), torch.empty_like(x)
        programs = min(len(scales), _PROGRAMS)
        sums = x.new_empty(programs, width, dtype=torch.float32)
        if programs:
            given = x, weight, scales, grad, grad_x, sums, len(scales), width, ctx.offset
            with on_device_of(x):
                _backward[(programs,)](*given, **_options(width))
        return grad_x, sums.sum(0).to(weight.dtype), None, None


def _options(width: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(max(block // 256, 4), 16)}
