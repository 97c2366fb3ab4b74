"""Sums of rows of routed tokens, and their gradients, each in one pass over the rows: operators for CUDA.

`forge_moe::sum_rows` and `forge_moe::sum_rows_backward` are opaque to torch.compile and run Triton kernels. For rows in 16
bits, K = 8 and no dropped slot they move 20 and 36 bytes per element of (T, D): each row is read once, each result
written once. The same with index_select and addcmul, one slot after the other, moves 108 and 324.

Shapes: R rows of width D, T tokens of K slots.
"""

import importlib.util

import torch
from torch import Tensor

__all__ = ["in_one_pass", "sum_rows", "sum_rows_backward"]

_HAS_TRITON = importlib.util.find_spec("triton") is not None  # part of torch's CUDA builds


def in_one_pass(device: torch.device) -> bool:
    """Whether the operators run on this device; elsewhere the caller sums with torch's own operators."""
    return device.type == "cuda" and _HAS_TRITON


@torch.library.custom_op("forge_moe::sum_rows", mutates_args=())
def sum_rows(
    rows: Tensor, row_of_slot: Tensor, weights: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Sums (T, D) in `dtype` of rows (R, D) at row_of_slot (T, K) int64, times weights (T, K) if given.

    An index of R or more adds nothing. Sums are fp32, over the slots in their order: the same bits every time.
    """
    from forge_moe.dispatch import _triton_rows

    out = rows.new_empty(row_of_slot.size(0), rows.size(1), dtype=dtype)
    if out.numel():
        _triton_rows.sum_rows(rows, row_of_slot, weights, out)
    return out


@sum_rows.register_fake
def _(rows: Tensor, row_of_slot: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    return rows.new_empty(row_of_slot.size(0), rows.size(1), dtype=dtype)


@torch.library.custom_op("forge_moe::sum_rows_backward", mutates_args=())
def sum_rows_backward(
    grad: Tensor, rows: Tensor, row_of_slot: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of rows (R, D) and of weights (T, K), in their dtypes, from the gradient (T, D) of the sums.

    Each row has exactly one slot.
    """
    from forge_moe.dispatch import _triton_rows

    grad_rows = rows.new_empty(rows.shape)
    grad_weights = torch.empty_like(weights, memory_format=torch.contiguous_format)
    if row_of_slot.numel():
        _triton_rows.sum_rows_backward(grad, rows, row_of_slot, weights, grad_rows, grad_weights)
    return grad_rows, grad_weights


@sum_rows_backward.register_fake
def _(grad: Tensor, rows: Tensor, row_of_slot: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), torch.empty_like(weights)
