"""Exchanges of keys, values and their gradients between ranks that hold parts of the same rows.

A row of S tokens is cut in 2 W chunks for W ranks; rank r holds chunks r and 2 W - 1 - r, in this order,
so that under a causal mask all have the same work.

Shapes: W ranks, B rows, S tokens of a row, s = S / W of them here, K key/value heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from forge_parallel._torch_compat import start_all_gather, start_reduce_scatter


def chunks_of(rank: int, size: int) -> tuple[int, int]:
    """The chunks that a rank holds, of 2 * size."""
    return rank, 2 * size - 1 - rank


def local_chunks(rows: Tensor, rank: int, size: int, dim: int) -> Tensor:
    """The tokens (..., s, ...) of a rank in rows (..., S, ...); dim is that of S."""
    chunks = rows.chunk(2 * size, dim)
    return torch.cat([chunks[n] for n in chunks_of(rank, size)], dim)


def join_parts(parts: Tensor, dim: int) -> Tensor:
    """Parts of all ranks (W, ..., s, ...) -> rows (..., S, ...); dim is that of s in a part."""
    first, second = (half.unbind(0) for half in parts.chunk(2, dim + 1))
    return torch.cat((*first, *reversed(second)), dim)


def split_parts(rows: Tensor, size: int, dim: int) -> Tensor:
    """Rows (..., S, ...) -> parts of all ranks (W, ..., s, ...), the inverse of `join_parts`."""
    return torch.stack([local_chunks(rows, rank, size, dim) for rank in range(size)])


class AllGather:
    """Parts: this rank's own keys, then those of whole rows in order (2, B, S, K, D).

    Forward: one all-gather of 2 B s K D elements a rank, under which the first part is computed.
    Backward: one reduce-scatter of as many, in fp32, under which the first part is computed. Memory: all
    keys and values stay until backward. Works on every backend.
    """

    saves_gathered = True

    def __init__(self, axis: Any) -> None:
        self.axis = axis

    def keys(self, kv: Tensor) -> Iterator[Tensor]:
        size = self.axis.size
        pending = start_all_gather(kv, size, self.axis.group.group_name)
        yield kv
        yield join_parts(pending().unflatten(0, (size, -1)), 2)

    def gradients(self, saved: Tensor, gradient: Callable[[int, Tensor], Tensor]) -> Tensor:
        size = self.axis.size
        parts = split_parts(gradient(1, saved), size, 2).flatten(0, 1)
        pending = start_reduce_scatter(parts, size, self.axis.group.group_name)
        return gradient(0, local_chunks(saved, self.axis.rank, size, 2)).add_(pending())


class Ring:
    """Parts: the keys of rank r, r - 1, ... (2, B, s, K, D), each sent on to rank r + 1 meanwhile.

    Forward: W - 1 exchanges of 2 B s K D elements. Backward: as many again, and W of as many in fp32 for
    the gradients, which follow the keys around the ring and reach their own rank last. Memory: two ranks' keys and values at
    a time, own ones until backward. Needs point-to-point communication between all neighbors.
    """

    saves_gathered = False

    def __init__(self, axis: Any) -> None:
        self.axis = axis

    def keys(self, kv: Tensor) -> Iterator[Tensor]:
        for step in range(self.axis.size):
            pending = self._send_on(kv, tag=0) if step + 1 < self.axis.size else None
            yield kv
            if pending is not None:
                kv = pending()

    def gradients(self, saved: Tensor, gradient: Callable[[int, Tensor], Tensor]) -> Tensor:
        incoming: Callable[[], Tensor] | None = None
        for part, kv in enumerate(self.keys(saved)):
            local_grad = gradient(part, kv)
            if incoming is not None:
                local_grad += incoming()
            incoming = self._send_on(local_grad, tag=1)
        assert incoming is not None
        return incoming()

    def _send_on(self, tensor: Tensor, tag: int) -> Callable[[], Tensor]:
        """Start to send to the next rank; the returned function waits for the tensors of the rank before."""
        rank, size, group = self.axis.rank, self.axis.size, self.axis.group
        ranks, pending = dist.get_process_group_ranks(group), torch.empty_like(tensor)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor, ranks[(rank + 1) % size], group, tag),
                dist.P2POp(dist.irecv, pending, ranks[(rank - 1) % size], group, tag),
            ]
        )

        def wait() -> Tensor:
            for work in works:
                work.wait()
            return pending

        return wait
