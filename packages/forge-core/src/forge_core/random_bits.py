"""Random numbers that are functions of (seed, name, row, column) of a tensor's element, and have no state.

A rank draws those of its own shard, on its device. They do not depend on the layout, nor on other tensors, and are the same
bits on each device: only operations that IEEE 754 rounds exactly are used.

Shapes: R rows and C columns of this rank's part of a tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from forge_core._shared.shards import local_indices, local_tensor

#: Elements of a piece: on a CPU what stays in a core's cache, elsewhere 16 MiB for each of its fp32 copies or tensors of
#: random bits.
PIECE = {"cpu": 2**15}
LARGE_PIECE = 2**22
#: An odd number with irregular bits: 2^64 over the golden ratio.
ODD = -7046029254386353131
#: Of the probabilities whose quantiles are in a table: the least exponent, and bits of the mantissa that choose an entry.
_LEAST, _CHOSEN = 53, 10


class ElementOffset(NamedTuple):
    """Positions of this rank's elements in the full tensor, which determine their random bits.

    key: of seed and name, 0-dim int64. rows: int64, of the shape of this rank's part without its last dim, their numbers in the full
    tensor. columns: (C,) int64. A vector is one column.
    """

    key: Tensor
    rows: Tensor
    columns: Tensor


def offset_of(parameter: Tensor, name: str, seed: int) -> ElementOffset:
    """Return the offset of this rank's part of a parameter. No communication."""
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
    key = int.from_bytes(digest[:8], "big", signed=True)
    return ElementOffset(torch.full((), key, dtype=torch.int64, device=device), rows, last)


def fill_normal(parameter: Tensor, std: float, name: str, seed: int) -> None:
    """Fill this rank's part of a parameter with normal numbers of mean 0, rounded to its dtype.

        fill_normal(model.head.weight, std=0.02, name="head.weight", seed=0)

    A value is std times the quantile of a 52-bit hash of (seed, name, row, column), within 1e-7 of the exact one.
    Cost: no communication, no host sync; about 25 elementwise kernels for 2^22 elements, and 150 MB on a GPU.
    """
    offset = offset_of(parameter, name, seed)
    intercepts, factors = _quantiles(offset.rows.device)
    columns = offset.columns * ODD
    whole = local_tensor(parameter.detach())
    tensor = whole.view(-1, 1) if whole.ndim < 2 else whole
    limit = PIECE.get(tensor.device.type, LARGE_PIECE)
    for rows, part in pieces(offset.rows, [tensor], limit):
        hashed = mixed(mixed(rows * ODD + offset.key)[:, None] + columns)  # (R, C) of the piece
        # Twice the probability of a larger absolute value, k / 2^52 + 2^-53 of the low 52 bits, by way of [1, 2).
        tail = hashed.bitwise_and((1 << 52) - 1).bitwise_or_(1023 << 52).view(torch.float64)
        tail.sub_(1 - 2.0**-53)
        entry = (tail.view(torch.int64) >> (52 - _CHOSEN)).sub_((1023 - _LEAST) << _CHOSEN)
        values = tail.mul_(factors[entry]).add_(intercepts[entry]).mul_(std)
        part.copy_(values.copysign_(hashed.view(torch.float64)))


@lru_cache(maxsize=8)
def _quantiles(device: torch.device) -> tuple[Tensor, Tensor]:
    """Lines (intercepts, factors) for the absolute value that a normal number exceeds with a probability p.

    There is one from 2^e (1 + k / 1024) to the next such p, for each e and k: with steps that are equal in ratio the error
    is as small in the tails.
    """
    bits = torch.arange((1023 - _LEAST) << _CHOSEN, (1023 << _CHOSEN) + 1) << (52 - _CHOSEN)
    p = bits.view(torch.float64)
    values = -torch.special.ndtri(p / 2)
    factors = _short(values.diff() / p.diff())
    return _short(values[:-1] - p[:-1] * factors).to(device), factors.to(device)


def _short(x: Tensor) -> Tensor:
    """fp64 rounded to 40 bits: libraries differ in the last bits of a quantile."""
    return (x.view(torch.int64) + (1 << 11) & ~((1 << 12) - 1)).view(torch.float64)


def pieces(rows: Tensor, tensors: Sequence[Tensor], limit: int) -> Iterator[tuple[Tensor, ...]]:
    """Pieces of full rows: of about `limit` elements, but not less than a row."""
    if tensors[0].ndim > 2:
        for parts in zip(rows.unbind(), *(tensor.unbind() for tensor in tensors)):
            yield from pieces(parts[0], parts[1:], limit)
    else:
        count = max(1, limit // max(1, tensors[0].size(1)))
        yield from zip(rows.split(count), *(tensor.split(count) for tensor in tensors))


def mixed(x: Tensor) -> Tensor:
    """Mix the bits of int64, a tensor of the caller's own, in place: the finalizer of splitmix64 (Steele et al. 2014)."""
    x.bitwise_xor_(shifted(x, 30)).mul_(-0x40A7B892E31B1A47)
    x.bitwise_xor_(shifted(x, 27)).mul_(-0x6B2FB644ECCEEE15)
    return x.bitwise_xor_(shifted(x, 31))


def shifted(x: Tensor, shift: int, width: int = 64) -> Tensor:
    """Shift right logically: torch's shift of a negative number fills in ones."""
    return (x >> shift).bitwise_and_((1 << (width - shift)) - 1)
