"""Exchanges under computation: chunk 2's rows travel while chunk 1's experts work.

Shapes: T tokens here, K slots per token, R rows for experts here, E experts here, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from forge_moe.dispatch.local import Dispatched


class ChunkedDispatch:
    """What dispatchers among ranks share: `dispatch`, `combine`, `run`, made of five steps of theirs.

    agree(list of ids (T_c, K)) -> sizes of each chunk; send(x, weights, ids, sizes) starts the rows;
    receive(what send gave) -> Dispatched; give_back(rows, meta) starts the sums; collect(what give_back
    gave) -> (T_c, D) fp32.
    """

    agree: Callable[[Sequence[Tensor]], list[Any]]
    send: Callable[..., Any]
    receive: Callable[[Any], Dispatched]
    give_back: Callable[[Tensor, Any], Any]
    collect: Callable[[Any], Tensor]

    def __init__(self, chunks: int) -> None:
        if chunks < 1:
            raise ValueError(f"chunks {chunks} must be at least 1; use 1, or 2 to overlap")
        self.chunks = chunks

    def dispatch(self, x: Tensor, weights: Tensor, ids: Tensor) -> Dispatched:
        """x (T, D), weights (T, K), ids (T, K) -> rows (R, D) by expert, counts (E,), no tail."""
        return self.receive(self.send(x, weights, ids, self.agree([ids])[0]))

    def combine(self, rows: Tensor, meta: Any) -> Tensor:
        """(T, D) fp32 from the experts' outputs rows (R, D)."""
        return self.collect(self.give_back(rows, meta))

    def run(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        experts: Callable[..., Tensor],
        meanwhile: Callable[[], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """dispatch, `experts(rows, counts, full=True)` and combine: (T, D) fp32; and meanwhile().

        The tokens are cut into `chunks` runs. `meanwhile` (shared experts) is called while the first rows
        travel; the rows of chunk i + 1 and the sums of chunk i - 1 travel under the experts of chunk i.
        Autograd takes the steps in reverse, so gradients travel under the same work. All chunks agree on
        their sizes at once: one host sync.

        A token's output does not depend on `chunks`; gradients of experts are summed over chunks. Each chunk
        costs one more of every exchange of rows and sums and one more call of `experts`, which under FSDP
        gathers its parameters each time unless `reshard_after_forward=False`. Under torch.compile it is
        left eager, experts and `meanwhile` included.
        """
        if torch.compiler.is_compiling():  # handles and host sizes are not for a graph
            return torch.compiler.disable(self._run)(x, weights, ids, experts, meanwhile)
        return self._run(x, weights, ids, experts, meanwhile)

    def _run(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        experts: Callable[..., Tensor],
        meanwhile: Callable[[], Tensor] | None,
    ) -> tuple[Tensor, Tensor | None]:
        parts = even_sizes(x.size(0), self.chunks)
        id_parts = ids.split(parts)
        jobs = list(zip(x.split(parts), weights.split(parts), id_parts, self.agree(id_parts)))
        pending = self.send(*jobs[0])
        beside = meanwhile() if meanwhile is not None else None
        homeward = []
        for following in [*jobs[1:], None]:
            arriving = pending
            if following is not None:
                pending = self.send(*following)
            sent = self.receive(arriving)
            homeward.append(self.give_back(experts(sent.rows, sent.counts, full=True), sent.meta))
        sums = [self.collect(trip) for trip in homeward]
        return sums[0] if len(sums) == 1 else torch.cat(sums), beside


def even_sizes(total: int, chunks: int) -> list[int]:
    """`chunks` sizes that differ by at most one; some are 0 if there are fewer tokens."""
    return [(total * (i + 1)) // chunks - (total * i) // chunks for i in range(chunks)]
