"""`rounding.round_into` as one Triton kernel: the same integers, without tensors of random bits.

Imported only where torch finds Triton and a GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from forge_core._torch_compat import on_device_of

_BLOCK = 1024
#: Tensors of one launch.
MOST = 3


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _round(stored, values, index, inside, row, column, key, NUMBER: tl.constexpr):  # type: ignore[no-untyped-def]
    # of a row, by splitmix64; `rounding` has the same steps on signed integers
    x = row.to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    x = x + (key + NUMBER // 2).to(tl.uint64, bitcast=True)
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)

    # of a row and a column, by lowbias32
    y = (x & 0xFFFFFFFF).to(tl.uint32) ^ column.to(tl.uint32, bitcast=True)
    y = (y ^ (y >> 16)) * 0x7FEB352D
    y = (y ^ (y >> 15)) * 0x846CA68B
    y = y ^ (y >> 16)
    if NUMBER % 2 == 1:
        y = y >> 16

    value = tl.load(values + index, mask=inside, other=0.0)
    bits = (value.to(tl.uint32, bitcast=True) + (y & 0xFFFF)) & 0xFFFF0000
    rounded = bits.to(tl.float32, bitcast=True)
    rounded = tl.where(value != value, value, rounded)  # NaN stays
    tl.store(stored + index, rounded.to(tl.bfloat16), mask=inside)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _kernel(  # type: ignore[no-untyped-def]
    key, rows, columns, stored_a, a, stored_b, b, stored_c, c, size, width,
    A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    row = tl.load(rows + index // width, mask=inside, other=0)
    column = tl.load(columns + index % width, mask=inside, other=0)
    seed = tl.load(key)
    _round(stored_a, a, index, inside, row, column, seed, A)
    if B >= 0:
        _round(stored_b, b, index, inside, row, column, seed, B)
    if C >= 0:
        _round(stored_c, c, index, inside, row, column, seed, C)


def round_into(
    tensors: list[tuple[int, Tensor, Tensor]], key: Tensor, rows: Tensor, columns: Tensor
) -> None:
    """`rounding.round_into` of at most `MOST` tensors, all contiguous."""
    size = tensors[0][1].numel()
    numbers = [number for number, _, _ in tensors] + [-1] * (MOST - len(tensors))
    # a launch without a second or third tensor does not read these
    pairs = [pair[1:] for pair in tensors]
    arguments = [t for pair in pairs + pairs[:1] * (MOST - len(pairs)) for t in pair]
    with on_device_of(rows):
        _kernel[(triton.cdiv(size, _BLOCK),)](
            key, rows, columns, *arguments, size, columns.numel(), *numbers, BLOCK=_BLOCK
        )
