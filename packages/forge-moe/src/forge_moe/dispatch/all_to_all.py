"""Dispatch among ranks that each hold a slice of the experts.

Shapes: T tokens of this rank, K slots per token, D width, E experts, W ranks, C chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from forge_moe._shared.problems import invalid
from forge_moe.dispatch import exchange
from forge_moe.dispatch.chunked import ChunkedDispatch
from forge_moe.dispatch.exchange import Exchange, Route
from forge_moe.dispatch.received_rows import ReceivedRows
from forge_moe.protocols import Dispatched
from forge_moe.replay import record_or_replay


class Splits(NamedTuple):
    """Sizes of an exchange on the host: rows to and from each rank (W,); of the received rows, the number
    with more than j slots on this rank, for j < K."""

    sent: list[int]
    received: list[int]
    rows_with_slot: list[int]


class Meta(NamedTuple):
    """The state of a dispatch that `start_combine` needs."""

    dispatched: Exchange
    weights: Tensor
    received: ReceivedRows


class AllToAllDispatch(ChunkedDispatch):
    """Send each token once to every rank of `group` that holds experts of it, and the sums back.

        dispatcher = AllToAllDispatch(mesh["ep"].get_group(), num_experts=64)
        rows, counts, meta = dispatcher.dispatch(x, weights, ids)   # of local experts, from all ranks
        y = dispatcher.combine(experts(rows, counts), meta)         # (T, D), this rank's tokens

    Rank r holds experts r E/W .. (r + 1) E/W - 1. Takes x (T, D), weights (T, K), ids (T, K) int64 in
    0..E, E for nowhere; T may differ among ranks and be 0. The weighted outputs of a token's experts on a
    rank are summed there in fp32, rounded once to x's dtype for the transfer, and the partial sums are
    added in fp32 by rank: with p_r the partial sum of rank r and u the unit roundoff of that dtype (2^-8
    in bf16), the transfer changes an element of y by at most u sum_r |p_r|. Sums have a fixed order: the
    same bits every time.

    Costs per layer: in the forward three exchanges (K integers per rank pair; rows with their ids and
    weights; sums), in the backward two; one host sync, for the split sizes, none when recomputed under
    `recompute_contexts()`. Bytes: README, Costs. Every rank of the group makes the same calls in the same
    order, and whether x and weights need gradients is the same on all. Raises ValueError when the ranks
    do not divide the experts.
    """

    def __init__(self, group: dist.ProcessGroup, num_experts: int, *, chunks: int = 1) -> None:
        super().__init__(chunks)
        self.group = group
        self.ranks = dist.get_world_size(group)
        check_divisible(num_experts, self.ranks)
        self.experts_per_rank = num_experts // self.ranks

    def exchange_splits(self, ids: Sequence[Tensor]) -> list[Splits]:
        """Split sizes of each chunk of ids (T_c, K): one exchange, one host sync."""
        return record_or_replay(self, "splits", lambda: self._exchange_splits(ids))

    def _exchange_splits(self, ids: Sequence[Tensor]) -> list[Splits]:
        rows = [exchange.rows_with_slot(part // self.experts_per_rank, self.ranks) for part in ids]
        outgoing = torch.stack(rows)  # (C, W, K)
        incoming = exchange.exchange_counts(outgoing, self.group)
        sizes = exchange.to_host(outgoing[..., 0], incoming[..., 0], incoming.sum(1))
        return [Splits(*of_chunk) for of_chunk in zip(*sizes)]

    def start_dispatch(
        self, x: Tensor, weights: Tensor, ids: Tensor, splits: Splits
    ) -> tuple[Exchange, list[int]]:
        """Start to send the rows; other work may follow before `finish_dispatch`."""
        rank_of_slot = ids // self.experts_per_rank
        route = Route.of(rank_of_slot, self.group, splits.sent, splits.received)
        started = exchange.start_dispatch(x, weights, ids, route, self.experts_per_rank)
        return started, splits.rows_with_slot

    def finish_dispatch(self, started: tuple[Exchange, list[int]]) -> Dispatched:
        """Wait for the rows and sort them by expert, then source rank, then token."""
        dispatched, rows_with_slot = started
        x, weights, ids = exchange.finish_dispatch(dispatched)
        received = ReceivedRows.of(ids, self.experts_per_rank, rows_with_slot)
        meta = Meta(dispatched, weights, received)
        return Dispatched(received.permute(x), received.counts, meta)

    def start_combine(self, rows: Tensor, meta: Meta) -> Exchange:
        """Sum the experts' outputs of each token and start to send the sums back."""
        return exchange.start_combine(meta.received.unpermute(rows, meta.weights), meta.dispatched)

    def finish_combine(self, combining: Exchange) -> Tensor:
        """Wait for the sums and add them up: (T, D) fp32."""
        return exchange.finish_combine(combining)


def check_divisible(num_experts: int, ranks: int, where: str = "") -> None:
    """Raise ValueError unless every rank gets the same number of experts."""
    if num_experts % ranks:
        divisors = ", ".join(str(n) for n in range(1, num_experts + 1) if num_experts % n == 0)
        more = -(-num_experts // ranks) * ranks
        rule = f"must be divisible by the {ranks} ranks of the group"
        fix = f"use {more} experts or ep {divisors}"
        raise invalid("num_experts", "divides", num_experts, rule, fix, where=where)
