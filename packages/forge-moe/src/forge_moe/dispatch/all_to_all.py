"""Dispatch among ranks that each hold a slice of the experts.

Shapes: T tokens here, K slots per token, D width, E experts, W ranks, C chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from forge_moe.dispatch import wire
from forge_moe.dispatch.arrivals import Arrivals
from forge_moe.dispatch.chunked import ChunkedDispatch
from forge_moe.dispatch.local import Dispatched
from forge_moe.replay import recall


class Splits(NamedTuple):
    """What the host must know of an exchange: rows to and from each rank; of the rows that arrive, how
    many have more than j slots here, for j < K."""

    sent: list[int]
    received: list[int]
    having: list[int]


class Meta(NamedTuple):
    """What `give_back` needs of a dispatch."""

    trip: wire.Trip
    weights: Tensor
    arrivals: Arrivals


class AllToAllDispatch(ChunkedDispatch):
    """Send each token once to every rank of `group` that holds experts of it, and the sums back.

        dispatcher = AllToAllDispatch(mesh["ep"].get_group(), num_experts=64)
        rows, counts, meta = dispatcher.dispatch(x, weights, ids)   # of my experts, from all ranks
        y = dispatcher.combine(experts(rows, counts), meta)         # (T, D), this rank's tokens

    Rank r holds experts r E/W .. (r + 1) E/W - 1. Takes x (T, D), weights (T, K), ids (T, K) int64 in
    0..E, E for nowhere; T may differ among ranks and be 0. The weighted outputs of a token's experts on a
    rank are summed there in fp32, rounded once to x's dtype for the wire, and the parts are added in fp32
    by rank: with p_r the part of rank r and u the unit roundoff of that dtype (2^-8 in bf16), the wire
    changes an element of y by at most u sum_r |p_r|. Sums have a fixed order: the same bits every time.

    Costs a layer: in the forward three exchanges (K integers per rank pair; rows with their ids and
    weights; sums), in the backward two; one host sync, for the split sizes, none when recomputed under
    `recompute_contexts()`. Bytes: README, Costs. Every rank of the group makes the same calls
    in the same order, and whether x and weights need gradients is the same on all. Raises ValueError when
    the ranks do not divide the experts.
    """

    def __init__(self, group: dist.ProcessGroup, num_experts: int, *, chunks: int = 1) -> None:
        super().__init__(chunks)
        self.group = group
        self.ranks = dist.get_world_size(group)
        check_division(num_experts, self.ranks)
        self.experts_here = num_experts // self.ranks

    def agree(self, ids: Sequence[Tensor]) -> list[Splits]:
        """Split sizes of each chunk of ids (T_c, K): one exchange, one host sync."""
        return recall(self, "splits", lambda: self._agree(ids))

    def _agree(self, ids: Sequence[Tensor]) -> list[Splits]:
        having = [wire.rows_having(part // self.experts_here, self.ranks) for part in ids]
        out = torch.stack(having)  # (C, W, K)
        arriving = wire.swap(out, self.group)
        sent, received, totals = wire.to_host(out[..., 0], arriving[..., 0], arriving.sum(1))
        return [Splits(*of_chunk) for of_chunk in zip(sent, received, totals)]

    def send(self, x: Tensor, weights: Tensor, ids: Tensor, splits: Splits) -> Pending:
        """Start the rows; other work may follow before `receive`."""
        owner = ids // self.experts_here
        route = wire.Route.of(owner, self.group, splits.sent, splits.received)
        return Pending(wire.send_out(x, weights, ids, route, self.experts_here), splits.having)

    def receive(self, pending: Pending) -> Dispatched:
        """Wait for the rows and sort them by expert, then source rank, then token."""
        x, weights, ids = wire.arrive(pending.trip)
        arrivals = Arrivals.of(ids, self.experts_here, pending.having)
        meta = Meta(pending.trip, weights, arrivals)
        return Dispatched(arrivals.spread(x), arrivals.counts, meta)

    def give_back(self, rows: Tensor, meta: Meta) -> wire.Trip:
        """Sum the experts' outputs of each token and start the sums; work may follow before `collect`."""
        return wire.send_home(meta.arrivals.gather(rows, meta.weights), meta.trip)

    def collect(self, trip: wire.Trip) -> Tensor:
        """Wait for the sums and add them up: (T, D) fp32."""
        return wire.arrive_home(trip)


class Pending(NamedTuple):
    """Rows on their way."""

    trip: wire.Trip
    having: list[int]


def check_division(num_experts: int, ranks: int) -> None:
    """Raise ValueError unless every rank gets the same number of experts."""
    if num_experts % ranks:
        fits = ", ".join(str(n) for n in range(1, num_experts + 1) if num_experts % n == 0)
        more = -(-num_experts // ranks) * ranks
        raise ValueError(
            f"num_experts {num_experts} must be divisible by the {ranks} ranks of the group; "
            f"use {more} experts or ep {fits}"
        )
