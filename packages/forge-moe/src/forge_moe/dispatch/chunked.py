"""Exchanges under computation: the rows of chunk 2 are in transfer while the experts compute chunk 1.

Shapes: T tokens of this rank, K slots per token, R rows for local experts, E local experts, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from forge_moe._shared.problems import invalid
from forge_moe.protocols import Dispatched


class ChunkedDispatch:
    """`dispatch`, `combine` and `run` of dispatchers between ranks, composed of five steps that they define.

    exchange_splits(list of ids (T_c, K)) -> the sizes of each chunk; start_dispatch(x, weights, ids, sizes)
    starts to send rows; finish_dispatch(its result) -> Dispatched; start_combine(rows, meta) starts to send
    sums back; finish_combine(its result) -> (T_c, D) fp32.
    """

    exchange_splits: Callable[[Sequence[Tensor]], list[Any]]
    start_dispatch: Callable[..., Any]
    finish_dispatch: Callable[[Any], Dispatched]
    start_combine: Callable[[Tensor, Any], Any]
    finish_combine: Callable[[Any], Tensor]

    def __init__(self, chunks: int) -> None:
        if chunks < 1:
            raise invalid("chunks", "range", chunks, "must be at least 1", "use 1, or 2 to overlap")
        self.chunks = chunks

    def dispatch(self, x: Tensor, weights: Tensor, ids: Tensor) -> Dispatched:
        """x (T, D), weights (T, K), ids (T, K) -> rows (R, D) by expert, counts (E,), no tail."""
        (splits,) = self.exchange_splits([ids])
        return self.finish_dispatch(self.start_dispatch(x, weights, ids, splits))

    def combine(self, rows: Tensor, meta: Any) -> Tensor:
        """(T, D) fp32 from the experts' outputs rows (R, D)."""
        return self.finish_combine(self.start_combine(rows, meta))

    def run(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        experts: Callable[..., Tensor],
        overlapped: Callable[[], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """dispatch, `experts(rows, counts, full=True)` and combine: (T, D) fp32; and overlapped().

        The tokens are split into `chunks` runs. `overlapped` (shared experts) is called during the first
        transfer; the rows of chunk i + 1 and the sums of chunk i - 1 are in transfer while the experts
        compute chunk i. Autograd takes the steps in reverse, so gradients overlap with the same work. One
        exchange gives the sizes of all chunks: one host sync.

        A token's output does not depend on `chunks`; gradients of experts are summed over chunks. Each chunk
        costs one more of every exchange of rows and sums and one more call of `experts`, which under FSDP
        gathers its parameters each time unless `reshard_after_forward=False`. torch.compile leaves all of it
        eager, experts and `overlapped` included.
        """
        if torch.compiler.is_compiling():  # a graph can hold neither work handles nor host sizes
            return torch.compiler.disable(self._run)(x, weights, ids, experts, overlapped)
        return self._run(x, weights, ids, experts, overlapped)

    def _run(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        experts: Callable[..., Tensor],
        overlapped: Callable[[], Tensor] | None,
    ) -> tuple[Tensor, Tensor | None]:
        sizes = even_sizes(x.size(0), self.chunks)
        id_chunks = ids.split(sizes)
        splits = self.exchange_splits(id_chunks)
        chunks = list(zip(x.split(sizes), weights.split(sizes), id_chunks, splits))
        started = self.start_dispatch(*chunks[0])
        beside = overlapped() if overlapped is not None else None
        combining = []
        for following in [*chunks[1:], None]:
            current = started
            if following is not None:  # in transfer while the experts compute the current chunk
                started = self.start_dispatch(*following)
            sent = self.finish_dispatch(current)
            out = experts(sent.rows, sent.counts, full=True)
            combining.append(self.start_combine(out, sent.meta))
        sums = [self.finish_combine(exchange) for exchange in combining]
        return sums[0] if len(sums) == 1 else torch.cat(sums), beside


def even_sizes(total: int, chunks: int) -> list[int]:
    """`chunks` sizes that differ by at most one; some are 0 if there are fewer tokens."""
    return [(total * (i + 1)) // chunks - (total * i) // chunks for i in range(chunks)]
