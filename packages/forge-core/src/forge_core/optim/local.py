"""What one rank holds of parameters, gradients and state, and pieces of it that stay in a CPU's cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

from torch import Tensor

#: Elements of a piece: 256 KiB in fp32, so that weights, gradients and momentum of one fit a core's cache.
_PIECE = 2**17


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

    On a GPU all rows at once, as each function then is one kernel. On a CPU a cache's worth of one row at
    a time, as each function there is a pass over memory: an update of five passes costs about as much as one.
    """
    if rows and rows[0][0].device.type != "cpu":
        yield tuple(map(list, zip(*rows)))
        return
    for row in rows:
        if row[0].numel() <= _PIECE or not all(t.is_contiguous() for t in row):
            yield tuple([t] for t in row)
        else:
            for parts in zip(*(t.view(-1).split(_PIECE) for t in row)):
                yield tuple([part] for part in parts)
