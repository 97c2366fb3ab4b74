"""Weights and moments that are stored in bf16: computed in fp32, and rounded stochastically.

A bf16 number has eight bits of precision, so nearest rounding drops every change below 1/256 of it or so: weights
stall, and an average that moves by a thousandth per step never follows. Rounded stochastically (up with a probability
of the distance from the value below, as Gupta et al. 2015) the stored value is right in the mean.

The random bits are a function of (seed, parameter name, step, row, column): replicas round alike, any layout rounds like
one process, and a resumed run like one that never stopped. There is no state next to the step.

Shapes: R rows and C columns of this rank's part of a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from forge_core import random_bits
from forge_core._torch_compat import has_triton
from forge_core.random_bits import LARGE_PIECE, ODD, PIECE, ElementOffset, mixed, pieces, shifted

#: Elements of a piece where a kernel of Triton holds the random bits in registers: 256 MiB for each fp32 copy.
_KERNEL_PIECE = 2**26
#: An odd number with irregular bits: 2^32 over the golden ratio.
_GOLDEN = -1640531527


def offset_of(parameter: Tensor, name: str, seed: int) -> ElementOffset:
    """`random_bits.offset_of` with hashed columns, int32; make it once. No communication."""
    found = random_bits.offset_of(parameter, name, seed)
    return found._replace(columns=_as_int32(found.columns * _GOLDEN))


class RoundedTensors(NamedTuple):
    """Arguments of `in_fp32` for one parameter: `stored` and `others` are this rank's parts, of one shape."""

    stored: Sequence[Tensor]
    others: Sequence[Tensor]
    offset: ElementOffset
    step: Tensor


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

    Cost: see `lists_in_fp32`, of which this is one parameter.
    """
    parameter = RoundedTensors(stored, others, offset, step)
    for _, columns in lists_in_fp32([parameter], first):
        yield from map(list, zip(*columns))


def lists_in_fp32(
    parameters: Sequence[RoundedTensors], first: int = 0
) -> Iterator[tuple[list[int], list[list[Tensor]]]]:
    """`in_fp32` of several parameters, for functions over lists such as `torch._foreach_*`.

        for numbers, (weights, moments, gradients) in lists_in_fp32(parameters):
            torch._foreach_lerp_(moments, gradients, 0.1)

    numbers: of the parameter of each piece. Pieces and random bits are those of `in_fp32`.

    Cost: no communication, no host sync. On a CPU a list is one piece, which stays in a core's cache, and about a dozen
    kernels round a tensor of it. On CUDA a list has pieces of 2^26 elements in all (256 MiB for the fp32 copies of each
    tensor), which a few kernels copy and one kernel per piece rounds, without tensors of random bits. Where torch has
    no Triton, and for tensors that are not contiguous, the kernels are those of CPUs.
    """
    # the random bits of all parameters differ in a number, 0-dim
    device = parameters[0].offset.rows.device
    steps = torch.stack([p.step.to(device) for p in parameters]).to(torch.int64)
    keys = mixed(steps * ODD + torch.stack([p.offset.key for p in parameters])).unbind()

    by_kernel = device.type == "cuda" and has_triton()
    limit = _KERNEL_PIECE if by_kernel else PIECE.get(device.type, LARGE_PIECE)
    for batch in _batches(parameters, limit, together=device.type not in PIECE):
        count = len(parameters[0].stored)
        half = [n for n in range(count) if _is_half(batch[0].parts[n])]
        columns = [[piece.parts[n] for piece in batch] for n in range(len(batch[0].parts))]
        for n in half:
            columns[n] = list_in_fp32(columns[n])
        yield [piece.number for piece in batch], columns

        for i, piece in enumerate(batch):
            offset = parameters[piece.number].offset
            tensors = [(first + n, piece.parts[n], columns[n][i]) for n in half]
            if tensors:
                store = _kernel() if by_kernel and _is_contiguous(tensors) else round_into
                store(tensors, keys[piece.number], piece.rows, offset.columns)


class _Piece(NamedTuple):
    """Rows of a parameter: its number, the rows' numbers in the full parameter, and its tensors (R, C)."""

    number: int
    rows: Tensor
    parts: tuple[Tensor, ...]


def _batches(
    parameters: Sequence[RoundedTensors], limit: int, together: bool
) -> Iterator[list[_Piece]]:
    """Lists of pieces with about `limit` elements in all, and stored tensors of the same dtypes; or of one piece."""
    found: list[_Piece] = []
    size = 0

    for number, p in enumerate(parameters):
        tensors, rows = [_matrix(tensor) for tensor in (*p.stored, *p.others)], p.offset.rows
        if all(tensor.is_contiguous() for tensor in tensors):
            tensors = [t.view(rows.numel(), t.size(-1)) for t in tensors]
            rows = rows.flatten()

        for numbers, *parts in pieces(rows, tensors, limit):
            dtypes = [part.dtype for part in parts]
            full = size + parts[0].numel() > limit
            if found and (full or not together or dtypes != [t.dtype for t in found[-1].parts]):
                yield found
                found, size = [], 0
            found.append(_Piece(number, numbers, tuple(parts)))
            size += parts[0].numel()
    if found:
        yield found


def list_in_fp32(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors in fp32: themselves, or copies that a few kernels make."""
    if all(tensor.dtype == torch.float32 for tensor in tensors):
        return tensors
    if len(tensors) == 1:
        return [tensors[0].float()]
    copies = [torch.empty_like(tensor, dtype=torch.float32) for tensor in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies


def _kernel() -> Callable[..., None]:
    from forge_core.optim import rounding_kernel  # Triton, which a CPU build of torch lacks

    return rounding_kernel.round_into


def _is_contiguous(tensors: list[tuple[int, Tensor, Tensor]]) -> bool:
    return all(t.is_contiguous() for _, *pair in tensors for t in pair)


def round_into(
    tensors: list[tuple[int, Tensor, Tensor]], key: Tensor, rows: Tensor, columns: Tensor
) -> None:
    """Round fp32 values of pieces of one parameter into its bf16 tensors: (number, stored, values)."""
    # a draw has 32 bits, and a tensor needs 16: two tensors share one
    bits: dict[int, Tensor] = {}
    for number, stored, values in tensors:
        pair, high = divmod(number, 2)
        if pair not in bits:
            bits = {pair: _draw(key + pair, rows, columns)}
        stored.copy_(round_by(values, bits[pair] >> 16 if high else bits[pair]))


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
