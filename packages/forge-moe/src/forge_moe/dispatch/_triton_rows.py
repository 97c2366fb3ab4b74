# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The Triton kernels of `row_sums`. Triton comes with torch's CUDA builds; only `row_sums` imports this module, late.

Shapes: R rows of width D, T tokens of K slots. Sums are fp32, over the slots in their order.
"""

from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_LARGEST_BLOCK = 1024


# Triton's own functions (tl.zeros, tl.sum) are not used: they cannot be interpreted where its compiler was imported.


@triton.jit
def _add(a, b):
    return a + b


@triton.jit
def _sum_rows(
    rows, row_of_slot, weights, out, num_rows, dim, stride, SLOTS: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < dim
    total = tl.full((BLOCK,), 0.0, dtype=tl.float32)

    for slot in range(SLOTS):
        row = tl.load(row_of_slot + token * SLOTS + slot)
        here = row < num_rows  # a slot without a row is not read
        value = tl.load(rows + row * stride + column, mask=inside & here, other=0.0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights + token * SLOTS + slot).to(tl.float32)
        total += value
    tl.store(out + token * dim + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _sum_rows_backward(
    grad, rows, row_of_slot, weights, grad_rows, grad_weights, num_rows, dim, stride, SLOTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)  # the slot among T K
    token = at // SLOTS
    row = tl.load(row_of_slot + at)
    here = row < num_rows
    weight = tl.load(weights + at).to(tl.float32)
    product = tl.full((BLOCK,), 0.0, dtype=tl.float32)

    for begin in range(0, dim, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = (column < dim) & here
        of_token = tl.load(grad + token * dim + column, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(rows + row * stride + column, mask=inside, other=0.0).to(tl.float32)
        product += of_token * value
        scaled = (of_token * weight).to(grad_rows.dtype.element_ty)
        tl.store(grad_rows + row * dim + column, scaled, mask=inside)
    tl.store(grad_weights + at, tl.reduce(product, 0, _add).to(grad_weights.dtype.element_ty))


def sum_rows(rows: Tensor, row_of_slot: Tensor, weights: Tensor | None, out: Tensor) -> None:
    """Write the sums of rows (R, D) at row_of_slot (T, K), times weights (T, K) if given, to out (T, D)."""
    rows, dim = _with_dense_rows(rows), rows.size(1)
    block = _block(dim)
    factors = out if weights is None else weights.contiguous()  # `out`: a pointer that is not read
    with _device_of(out):
        _sum_rows[(row_of_slot.size(0), triton.cdiv(dim, block))](
            rows, row_of_slot.contiguous(), factors, out, rows.size(0), dim, rows.stride(0),
            SLOTS=row_of_slot.size(1), WEIGHTED=weights is not None, BLOCK=block,
        )  # fmt: skip


def sum_rows_backward(
    grad: Tensor,
    rows: Tensor,
    row_of_slot: Tensor,
    weights: Tensor,
    grad_rows: Tensor,
    grad_weights: Tensor,
) -> None:
    """Write the gradients of rows (R, D) and of weights (T, K) from the gradient of the sums (T, D)."""
    rows, dim = _with_dense_rows(rows), rows.size(1)
    with _device_of(grad):
        _sum_rows_backward[(row_of_slot.numel(),)](
            grad.contiguous(), rows, row_of_slot.contiguous(), weights.contiguous(), grad_rows, grad_weights,
            rows.size(0), dim, rows.stride(0), SLOTS=row_of_slot.size(1), BLOCK=_block(dim),
        )  # fmt: skip


def _with_dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _block(dim: int) -> int:
    return min(triton.next_power_of_2(dim), _LARGEST_BLOCK)


def _device_of(x: Tensor) -> Any:
    # Triton launches on the current device.
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
