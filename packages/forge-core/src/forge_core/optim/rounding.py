"""Weights and moments that are stored in bf16: computed in fp32, and rounded stochastically.

A bf16 number has eight bits of precision, so nearest rounding drops every change below 1/256 of it or so: weights
stall, and an average that moves by a thousandth per step never follows. Rounded stochastically (up with a probability
of the distance from the value below, as Gupta et al. 2015) the stored value is right in the mean.

The random bits are a function of (seed, parameter name, step, row, column): replicas round alike, any layout rounds like
one process, and a resumed run like one that never stopped. There is no state next to the step.

Shapes: R rows and C columns of this rank's part of a parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from forge_core.random_bits import ODD, ElementOffset, mixed, pieces, shifted

#: An odd number with irregular bits: 2^32 over the golden ratio.
_GOLDEN = -1640531527


def in_fp32(
    stored: Sequence[Tensor],
    others: Sequence[Tensor],
    offset: ElementOffset,
    step: Tensor,
    first: int = 0,
) -> Iterator[list[Tensor]]:
    """Yield pieces of `stored` in fp32, then of `others`; what the loop leaves in the former is stored in `stored`.

        for weight, moment, gradient in in_fp32([weights, moments], [gradients], offset, step):
            moment.lerp_(gradient.float(), 0.1)
            weight.sub_(moment)

    All tensors are this rank's parts, of one shape. A piece of an fp32 tensor and of `others` is a view. A piece of a
    bf16 tensor is a copy that is rounded stochastically; a value that bf16 can hold, infinities and NaN stay as they
    are, so a loop that changes nothing changes no bits. A finite value beyond bf16's range becomes infinite, or the
    largest one. `step` (0-dim) selects the random bits. `first` is the number of the first of `stored` among the tensors
    of a parameter: two with the same number and step round by the same bits.

    Cost: no communication, no host sync; about a dozen elementwise kernels for a tensor and piece. Memory of one piece
    (2^22 elements on a GPU, or a row): an fp32 copy of each bf16 tensor, and three int32 tensors of random bits.
    """
    key = mixed(step.to(offset.rows.device, torch.int64) * ODD + offset.key)  # 0-dim
    tensors = [_matrix(tensor) for tensor in (*stored, *others)]
    rows = offset.rows
    if all(tensor.is_contiguous() for tensor in tensors):
        tensors, rows = [t.view(rows.numel(), t.size(-1)) for t in tensors], rows.flatten()

    columns = _as_int32(offset.columns * _GOLDEN)
    for numbers, *parts in pieces(rows, tensors):
        half = [(n, part) for n, part in enumerate(parts[: len(stored)]) if _is_half(part)]
        wide = {n: part.float() for n, part in half}
        yield [wide.get(n, part) for n, part in enumerate(parts)]

        # a draw has 32 bits, and a tensor needs 16: two tensors share one
        bits: dict[int, Tensor] = {}
        for n, part in half:
            pair, high = divmod(first + n, 2)
            if pair not in bits:
                bits = {pair: _draw(key + pair, numbers, columns)}
            part.copy_(round_by(wide[n], bits[pair] >> 16 if high else bits[pair]))


def round_by(values: Tensor, bits: Tensor) -> Tensor:
    """Round fp32 values to ones that bf16 can hold, down or up in magnitude, by the low 16 of random bits (int32).

    Their sum carries into the upper 16 bits with the probability of the distance from the value below.
    """
    rounded = (bits & 0xFFFF).add_(values.view(torch.int32)).bitwise_and_(-0x10000)
    return torch.where(values.isnan(), values, rounded.view(torch.float32))


def _is_half(tensor: Tensor) -> bool:
    return tensor.dtype == torch.bfloat16


def _matrix(tensor: Tensor) -> Tensor:
    """A vector or a number as one column."""
    return tensor.view(-1, 1) if tensor.ndim < 2 else tensor


def _draw(key: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Random bits (R, C) int32: a 64-bit mix of a row's number, then a 32-bit one of that and the column's."""
    x = _as_int32(mixed(rows * ODD + key))[:, None] ^ columns
    for shift, factor in ((16, 0x7FEB352D), (15, -0x7B935975)):  # Wellons 2018, "lowbias32"
        x.bitwise_xor_(shifted(x, shift, 32)).mul_(factor)
    return x.bitwise_xor_(shifted(x, 16, 32))


def _as_int32(x: Tensor) -> Tensor:
    """The low 32 bits of an int64."""
    return (((x & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000).to(torch.int32)
