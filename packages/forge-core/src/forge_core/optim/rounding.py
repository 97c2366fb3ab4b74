"""Weights and moments that are stored in bf16: computed in fp32, and rounded stochastically.

A bf16 number has eight bits of precision, so nearest rounding drops every change below 1/256 of it or so: weights
stall, and an average that moves by a thousandth per step never follows. Rounded stochastically (up with the
probability of the distance from below, as Gupta et al. 2015 did) the stored value is right in the mean.

The chance is a function of (seed, parameter name, step, row, column): ranks that hold copies round alike, any layout
rounds like one process, and a resumed run like one that never stopped. There is no state beside the step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from forge_core._indices import own_indices
from forge_core.optim.local import shard

#: Elements of a piece: on a CPU what stays in a core's cache, elsewhere 16 MiB for each of its fp32 copies.
_PIECE = {"cpu": 2**15}
_LARGE_PIECE = 2**22


class Place(NamedTuple):
    """What the chance of a parameter's elements on this rank depends on, beside the step.

    key: of seed and name. rows: int64, of the shape of this rank's part without its last dim, their numbers in
    the whole parameter. columns: (C,) int32. A vector is one column.
    """

    key: int
    rows: Tensor
    columns: Tensor


def place_of(parameter: Tensor, name: str, seed: int) -> Place:
    """The place of this rank's part of a parameter; make it once. Nothing is sent."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    device = shard(parameter).device
    *lead, last = [own_indices(parameter, dim) for dim in range(parameter.ndim)] or [
        torch.zeros(1, dtype=torch.int64, device=device)
    ]
    if not lead:
        lead, last = [last], last.new_zeros(1)
    rows = lead[0]
    for size, index in zip(parameter.shape[1:-1], lead[1:]):
        rows = rows[..., None] * size + index
    columns = _as_int32(last * _GOLDEN)
    return Place(int.from_bytes(digest[:8], "big", signed=True), rows, columns)


def widened(
    kept: Sequence[Tensor],
    others: Sequence[Tensor],
    place: Place,
    step: Tensor,
    first: int = 0,
) -> Iterator[list[Tensor]]:
    """Pieces of `kept` in fp32, then of `others`; what a loop leaves in the former is stored in `kept`.

        for weight, moment, gradient in widened([weights, moments], [gradients], place, step):
            moment.lerp_(gradient.float(), 0.1)
            weight.sub_(moment)

    All are parts of one shape on this rank. A piece of an fp32 tensor and of `others` is a view. What is in bf16
    is copied, and rounded stochastically; a value that bf16 can hold, infinities and NaN stay as they are, so a
    loop that changes nothing changes no bits. A finite one beyond bf16's range becomes infinite, or its largest.
    `step` (0-dim) counts: its next value draws anew. `first` is the number of the first of `kept` among a parameter's
    tensors: two of one number and step round by the same chance.

    Cost: no communication, no host sync; about a dozen elementwise kernels for a tensor and piece. Memory: of one piece
    (2^22 elements on a GPU, or a row) an fp32 copy for each of `kept` in bf16, and three int32 for the chance.
    """
    key = _mixed(step.to(place.rows.device, torch.int64) * _ODD + place.key)  # 0-dim
    tensors = [_matrix(tensor) for tensor in (*kept, *others)]
    whole = place.rows
    if all(tensor.is_contiguous() for tensor in tensors):
        tensors, whole = [t.view(whole.numel(), t.size(-1)) for t in tensors], whole.flatten()
    limit = _PIECE.get(tensors[0].device.type, _LARGE_PIECE)
    for rows, *parts in _pieces(whole, tensors, limit):
        half = [(n, part) for n, part in enumerate(parts[: len(kept)]) if _is_half(part)]
        wide = {n: part.float() for n, part in half}
        yield [wide.get(n, part) for n, part in enumerate(parts)]
        chance: dict[int, Tensor] = {}
        for n, part in half:
            pair, high = divmod(first + n, 2)  # a draw has 32 bits, and a tensor needs 16
            if pair not in chance:
                chance = {pair: _draw(key + pair, rows, place.columns)}
            part.copy_(round_by(wide[n], chance[pair] >> 16 if high else chance[pair]))


def round_by(values: Tensor, chance: Tensor) -> Tensor:
    """fp32 values, down or up in magnitude to ones that bf16 can hold, as the low 16 bits of `chance` (int32) say."""
    bits = (chance & 0xFFFF).add_(values.view(torch.int32)).bitwise_and_(-0x10000)
    return torch.where(values.isnan(), values, bits.view(torch.float32))


def _is_half(tensor: Tensor) -> bool:
    return tensor.dtype == torch.bfloat16


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.view(-1, 1) if tensor.ndim < 2 else tensor


def _pieces(rows: Tensor, tensors: list[Tensor], limit: int) -> Iterator[tuple[Tensor, ...]]:
    """Pieces of whole rows: of about `limit` elements, but not less than a row."""
    if tensors[0].ndim > 2:
        for parts in zip(rows.unbind(), *(tensor.unbind() for tensor in tensors)):
            yield from _pieces(parts[0], list(parts[1:]), limit)
    else:
        count = max(1, limit // max(1, tensors[0].size(1)))
        yield from zip(rows.split(count), *(tensor.split(count) for tensor in tensors))


#: Odd numbers with irregular bits: 2^64 and 2^32 over the golden ratio.
_ODD, _GOLDEN = -7046029254386353131, -1640531527


def _draw(key: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """(R, C) int32, random bits: a 64-bit mix of a row's number, a 32-bit one of that and the column's."""
    x = _as_int32(_mixed(rows * _ODD + key))[:, None] ^ columns
    for shift, factor in ((16, 0x7FEB352D), (15, -0x7B935975)):  # Wellons 2018, "lowbias32"
        x.bitwise_xor_(_right(x, shift, 32)).mul_(factor)
    return x.bitwise_xor_(_right(x, 16, 32))


def _mixed(x: Tensor) -> Tensor:
    """int64, by the finaliser of splitmix64 (Steele et al. 2014)."""
    x = (x ^ _right(x, 30, 64)) * -0x40A7B892E31B1A47
    x = (x ^ _right(x, 27, 64)) * -0x6B2FB644ECCEEE15
    return x ^ _right(x, 31, 64)


def _right(x: Tensor, shift: int, width: int) -> Tensor:
    """A logical shift: torch's carries the sign down."""
    return (x >> shift).bitwise_and_((1 << (width - shift)) - 1)


def _as_int32(x: Tensor) -> Tensor:
    """The low 32 bits of an int64."""
    return (((x & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000).to(torch.int32)
