"""Weights and moments that are stored in bf16: computed in fp32, and rounded stochastically.

A bf16 number has eight bits of precision, so nearest rounding drops every change below 1/256 of it or so: weights
stall, and an average that moves by a thousandth per step never follows. Rounded stochastically (up with a probability
of the distance from the value below, as Gupta et al. 2015) the stored value is right in the mean.

The random bits are a function of (seed, parameter name, step, row, column): replicas round alike, any layout rounds like
one process, and a resumed run like one that never stopped. There is no state next to the step.

Shapes: R rows and C columns of this rank's part of a parameter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from forge_core._shared.shards import local_indices, local_tensor

#: Elements of a piece: on a CPU what stays in a core's cache, elsewhere 16 MiB for each of its fp32 copies.
_PIECE = {"cpu": 2**15}
_LARGE_PIECE = 2**22
#: Odd numbers with irregular bits: 2^64 and 2^32 over the golden ratio.
_ODD, _GOLDEN = -7046029254386353131, -1640531527


class ElementOffset(NamedTuple):
    """Positions of this rank's elements in the full parameter: with the step, they determine the random bits.

    key: of seed and name. rows: int64, of the shape of this rank's part without its last dim, their numbers in the full
    parameter. columns: (C,) int32, hashed. A vector is one column.
    """

    key: int
    rows: Tensor
    columns: Tensor


def offset_of(parameter: Tensor, name: str, seed: int) -> ElementOffset:
    """Return the offset of this rank's part of a parameter; make it once. No communication."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    device = local_tensor(parameter).device
    *lead, last = [local_indices(parameter, dim) for dim in range(parameter.ndim)] or [
        torch.zeros(1, dtype=torch.int64, device=device)
    ]
    if not lead:
        lead, last = [last], last.new_zeros(1)

    # a row's number counts over all dims but the last: (d0 * size1 + d1) * size2 + d2 ...
    rows = lead[0]
    for size, index in zip(parameter.shape[1:-1], lead[1:]):
        rows = rows[..., None] * size + index
    columns = _as_int32(last * _GOLDEN)
    return ElementOffset(int.from_bytes(digest[:8], "big", signed=True), rows, columns)


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
    key = _mixed(step.to(offset.rows.device, torch.int64) * _ODD + offset.key)  # 0-dim
    tensors = [_matrix(tensor) for tensor in (*stored, *others)]
    rows = offset.rows
    if all(tensor.is_contiguous() for tensor in tensors):
        tensors, rows = [t.view(rows.numel(), t.size(-1)) for t in tensors], rows.flatten()

    limit = _PIECE.get(tensors[0].device.type, _LARGE_PIECE)
    for numbers, *parts in _pieces(rows, tensors, limit):
        half = [(n, part) for n, part in enumerate(parts[: len(stored)]) if _is_half(part)]
        wide = {n: part.float() for n, part in half}
        yield [wide.get(n, part) for n, part in enumerate(parts)]

        # a draw has 32 bits, and a tensor needs 16: two tensors share one
        bits: dict[int, Tensor] = {}
        for n, part in half:
            pair, high = divmod(first + n, 2)
            if pair not in bits:
                bits = {pair: _draw(key + pair, numbers, offset.columns)}
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


def _pieces(rows: Tensor, tensors: list[Tensor], limit: int) -> Iterator[tuple[Tensor, ...]]:
    """Pieces of full rows: of about `limit` elements, but not less than a row."""
    if tensors[0].ndim > 2:
        for parts in zip(rows.unbind(), *(tensor.unbind() for tensor in tensors)):
            yield from _pieces(parts[0], list(parts[1:]), limit)
    else:
        count = max(1, limit // max(1, tensors[0].size(1)))
        yield from zip(rows.split(count), *(tensor.split(count) for tensor in tensors))


def _draw(key: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Random bits (R, C) int32: a 64-bit mix of a row's number, then a 32-bit one of that and the column's."""
    x = _as_int32(_mixed(rows * _ODD + key))[:, None] ^ columns
    for shift, factor in ((16, 0x7FEB352D), (15, -0x7B935975)):  # Wellons 2018, "lowbias32"
        x.bitwise_xor_(_right(x, shift, 32)).mul_(factor)
    return x.bitwise_xor_(_right(x, 16, 32))


def _mixed(x: Tensor) -> Tensor:
    """Mix the bits of int64 by the finalizer of splitmix64 (Steele et al. 2014)."""
    x = (x ^ _right(x, 30, 64)) * -0x40A7B892E31B1A47
    x = (x ^ _right(x, 27, 64)) * -0x6B2FB644ECCEEE15
    return x ^ _right(x, 31, 64)


def _right(x: Tensor, shift: int, width: int) -> Tensor:
    """Shift right logically: torch's shift of a negative number fills in ones."""
    return (x >> shift).bitwise_and_((1 << (width - shift)) - 1)


def _as_int32(x: Tensor) -> Tensor:
    """The low 32 bits of an int64."""
    return (((x & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000).to(torch.int32)
