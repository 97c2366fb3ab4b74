"""`rope.rotate` of 16-bit tensors in one Triton kernel. Imported only where torch finds Triton and a GPU."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from forge_core._torch_compat import on_device_of


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _kernel(  # type: ignore[no-untyped-def]
    x, cos, sin, out, size, of_token, of_table, half, direction, BLOCK: tl.constexpr
):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # of a pair
    inside = index < size
    first = index // half * (2 * half) + index % half
    # tables of one sequence serve all of them
    entry = (index // of_token * half + index % half) % of_table
    c = tl.load(cos + entry, mask=inside, other=0.0)
    s = tl.load(sin + entry, mask=inside, other=0.0) * direction
    a = tl.load(x + first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + first + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + first, (a * c - b * s).to(out.dtype.element_ty), mask=inside)
    tl.store(out + first + half, (b * c + a * s).to(out.dtype.element_ty), mask=inside)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, direction: float) -> Tensor:
    """`rope._rotate`: x (B, S, H, D), tables (B or 1, S, 1, D / 2) fp32, direction 1.0 or -1.0."""
    x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
    out, half = x.new_empty(x.shape), cos.size(-1)
    size, block = x.numel() // 2, 1024
    if size:
        given = x, cos, sin, out, size, x.size(2) * half, cos.numel(), half, direction
        with on_device_of(x):
            _kernel[(triton.cdiv(size, block),)](*given, BLOCK=block)
    return out
