"""What one rank holds of parameters, gradients and state, and pieces of it that stay in a CPU's cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

from torch import Tensor

#: Elements of a piece: 512 KiB in fp32, so that weights, gradients and momentum of one fit a core's cache.
_PIECE = 2**17
#: Elsewhere: 64 MiB in fp32, some thousand times what a kernel's start costs.
_LARGE_PIECE = 2**24


def shard(tensor: Tensor) -> Tensor:
    """The part of a DTensor that this rank holds, sharing its memory; another tensor itself.

    Duck-typed, so that torch.distributed.tensor is not imported by those who do not use it.
    """
    return cast(Tensor, cast(Any, tensor).to_local()) if hasattr(tensor, "to_local") else tensor


def gradient_shard(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter's gradient; communicates if that is laid out otherwise."""
    gradient: Any = parameter.grad
    placements = getattr(parameter, "placements", None)
    if placements is not None and gradient.placements != placements:
        gradient = gradient.redistribute(placements=placements)
    return shard(gradient)


def pieces(rows: Sequence[tuple[Tensor, ...]]) -> Iterator[tuple[list[Tensor], ...]]:
    """Columns of `rows` (tensors of one shape each) for functions that work on lists, such as `torch._foreach_*`.

    On a CPU a cache's worth of one row at a time, as each function there is a pass over memory: an update of
    five passes costs about as much as one. On a GPU, where each is one kernel, as many rows as make
    `_LARGE_PIECE` elements, and longer ones cut: what a loop makes of them is small, however large the model.
    """
    found: list[tuple[Tensor, ...]] = []
    count = 0
    for parts in (parts for row in rows for parts in _cut(row)):
        if found and (_on_cpu(parts) or count + parts[0].numel() > _LARGE_PIECE):
            yield tuple(map(list, zip(*found)))
            found, count = [], 0
        found.append(parts)
        count += parts[0].numel()
    if found:
        yield tuple(map(list, zip(*found)))


def _cut(row: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, ...]]:
    """Views of a row's tensors, each of a piece's elements at most; of its rows, where one is not contiguous."""
    limit = _PIECE if _on_cpu(row) else _LARGE_PIECE
    if row[0].numel() <= limit:
        yield row
    elif all(tensor.is_contiguous() for tensor in row):
        yield from zip(*(tensor.view(-1).split(limit) for tensor in row))
    else:
        count = max(1, limit * len(row[0]) // row[0].numel())
        yield from zip(*(tensor.split(count) for tensor in row))


def _on_cpu(row: tuple[Tensor, ...]) -> bool:
    return row[0].device.type == "cpu"
