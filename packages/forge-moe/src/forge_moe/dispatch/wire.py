"""Rows on their way between ranks: who gets what, how a row is packed, two differentiable trips.

Shapes: T tokens here, K slots per token, D width, W ranks of the group, P parts per token
(min(K, W)), N rows that leave, M rows that arrive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

_ALIGNMENT = 16  # bytes; vector loads of a row start on it


class RowLayout(NamedTuple):
    """One outgoing row as bytes: D elements, K weights, K int32 ids, padded to 16 bytes.

    Views into a (rows, num_bytes) uint8 buffer; no copies. Gradients go back without the ids.
    """

    dim: int
    slots: int
    dtype: torch.dtype
    weight_dtype: torch.dtype
    with_ids: bool = True

    @property
    def num_bytes(self) -> int:
        ids = 4 * self.slots if self.with_ids else 0
        return _round_up(self._ids_at + ids)

    def hidden(self, buffer: Tensor) -> Tensor:
        """(rows, D) in `dtype`."""
        return buffer[:, : self.dim * self.dtype.itemsize].view(self.dtype)

    def weights(self, buffer: Tensor) -> Tensor:
        """(rows, K) in `weight_dtype`."""
        return buffer[:, self._weights_at : self._ids_at].view(self.weight_dtype)

    def ids(self, buffer: Tensor) -> Tensor:
        """(rows, K) int32."""
        return buffer[:, self._ids_at : self._ids_at + 4 * self.slots].view(torch.int32)

    @property
    def _weights_at(self) -> int:
        return _round_up(self.dim * self.dtype.itemsize, self.weight_dtype.itemsize)

    @property
    def _ids_at(self) -> int:
        return self._weights_at + self.slots * self.weight_dtype.itemsize


def _round_up(size: int, multiple: int = _ALIGNMENT) -> int:
    return (size + multiple - 1) // multiple * multiple


class Route(NamedTuple):
    """Which tokens go to which ranks: one row per token and rank, by rank, then by token.

    token (N,) the token of each row; row_of_slot (T, K) the row that a slot travels in, N for
    nowhere; parts (T, P) the rows of a token by rank, then N. sent, received (W,) rows per rank.
    """

    group: dist.ProcessGroup
    token: Tensor
    row_of_slot: Tensor
    parts: Tensor
    sent: list[int]
    received: list[int]

    @classmethod
    def of(
        cls, owner: Tensor, group: dist.ProcessGroup, sent: list[int], received: list[int]
    ) -> Route:
        """The route for owner (T, K) in 0..W (W is nowhere). Device work of O(T W), no host sync."""
        num_tokens, slots = owner.shape
        ranks, rows = len(sent), sum(sent)
        wanted = wants(owner, ranks)  # (T, W)
        place = wanted.t().flatten().cumsum(0).view(ranks, num_tokens).t() - 1
        row = torch.where(wanted, place, rows)  # (T, W)
        tokens = torch.arange(num_tokens, device=owner.device).unsqueeze(1).expand_as(row)
        token = row.new_zeros(rows + 1).scatter_(0, row.flatten(), tokens.flatten())[:rows]
        nowhere = row.new_full((num_tokens, 1), rows)
        return cls(
            group,
            token,
            torch.cat((row, nowhere), dim=1).gather(1, owner),
            row.topk(min(slots, ranks), dim=1, largest=False, sorted=True).values,
            sent,
            received,
        )


def wants(owner: Tensor, ranks: int) -> Tensor:
    """(T, W) bool: whether a token has a slot on a rank, from owner (T, K) in 0..W."""
    marks = torch.zeros(owner.size(0), ranks + 1, dtype=torch.bool, device=owner.device)
    return marks.scatter_(1, owner, True)[:, :ranks]


def rows_having(owner: Tensor, ranks: int) -> Tensor:
    """(W, K) int64: how many tokens have more than j slots on a rank, j < K; column 0 counts the rows."""
    slots = owner.size(1)
    number = owner.new_zeros(owner.size(0), ranks + 1)
    number = number.scatter_add_(1, owner, torch.ones_like(owner))[:, :ranks]  # (T, W)
    return (number.unsqueeze(2) > torch.arange(slots, device=owner.device)).sum(0)


def swap(numbers: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Numbers (C, W, n) for each rank -> (C, W, n) from each rank. One small exchange."""
    out = numbers.transpose(0, 1).contiguous()
    arriving = torch.empty_like(out)
    dist.all_to_all_single(arriving, out, group=group)
    return arriving.transpose(0, 1)


def to_host(*numbers: Tensor) -> list[list[list[int]]]:
    """Several (C, n) int64 tensors as lists: the one place where the host waits for the device."""
    return [
        part.tolist() for part in torch.cat(numbers, 1).cpu().split([n.size(1) for n in numbers], 1)
    ]


@dataclass
class _Leg:
    """One exchange under way. `buffer` holds what arrives, and a zero row after it."""

    buffer: Tensor
    work: Any
    outgoing: Tensor  # kept alive until the exchange is over


def _land(leg: _Leg | None) -> Tensor:
    assert leg is not None, "an exchange begins before it ends"
    leg.work.wait()
    return leg.buffer


def _start(rows: Tensor, route: Route, *, home: bool) -> _Leg:
    """Begin to exchange rows (n, width) along the route, or back `home`."""
    outgoing, incoming = route.sent, route.received
    if home:
        outgoing, incoming = incoming, outgoing
    buffer = rows.new_empty(sum(incoming) + 1, rows.size(1))
    buffer[-1].zero_()
    work = dist.all_to_all_single(buffer[:-1], rows, incoming, outgoing, route.group, async_op=True)
    return _Leg(buffer, work, rows)


def _sum_parts(rows: Tensor, route: Route, dtype: torch.dtype) -> Tensor:
    """(T, D) in `dtype`: sums of each token's rows of (N + 1, D), lowest rank first."""
    total = torch.zeros(route.parts.size(0), rows.size(1), dtype=dtype, device=rows.device)
    for part in route.parts.unbind(1):
        total += rows.index_select(0, part)
    return total


@dataclass
class Trip:
    """A trip out or home: its route, its exchanges, the tensor that ties its ends in the graph."""

    route: Route
    layout: RowLayout
    dtype: torch.dtype  # of the sums that go home
    experts_there: int = 0
    there: _Leg | None = None
    back: _Leg | None = None
    tie: Tensor | None = None

    def untie(self) -> Tensor:
        """The tensor between the ends; given away, as the graph behind it holds this trip."""
        assert self.tie is not None, "a trip ends once"
        tie, self.tie = self.tie, None
        return tie


def send_out(x: Tensor, weights: Tensor, ids: Tensor, route: Route, experts_there: int) -> Trip:
    """Start x (T, D), weights (T, K), ids (T, K) towards their ranks; `arrive` ends the trip.

    Each rank of the route holds `experts_there` experts and gets ids in its own numbers. One exchange;
    in the backward one more, of the gradients.
    """
    layout = RowLayout(x.size(1), ids.size(1), x.dtype, weights.dtype)
    trip = Trip(route, layout, weights.dtype, experts_there)
    trip.tie = _Depart.apply(x, weights, ids, trip)
    return trip


def arrive(trip: Trip) -> tuple[Tensor, Tensor, Tensor]:
    """x (M, D), weights (M, K), ids (M, K) int64 in 0..experts_there of the rows that came here."""
    return _Arrive.apply(trip.untie(), trip)


def send_home(sums: Tensor, out: Trip) -> Trip:
    """Start sums (M, D) of the rows of `out` towards the ranks of their tokens, in its dtype."""
    trip = Trip(out.route, out.layout, sums.dtype)
    trip.tie = _DepartHome.apply(sums, trip)
    return trip


def arrive_home(trip: Trip) -> Tensor:
    """(T, D) in the dtype of the sums sent: the sum of each token's parts, lowest rank first."""
    return _ArriveHome.apply(trip.untie(), trip)


# Each trip is two functions with an empty tensor between them, so that other work fits between the start
# and the end of an exchange, in the backward too: there the second starts the exchange of gradients and
# the first, which autograd runs later, ends it.


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, ids: Tensor, trip: Trip) -> Tensor:
        ctx.trip = trip
        route, layout = trip.route, trip.layout
        rows = route.token.size(0)
        packed = torch.empty(rows, layout.num_bytes, dtype=torch.uint8, device=x.device)
        torch.index_select(x, 0, route.token, out=layout.hidden(packed))
        number = torch.arange(rows, device=x.device).unsqueeze(1)
        here = route.row_of_slot.index_select(0, route.token) == number  # (N, K)
        own = weights.index_select(0, route.token)
        layout.weights(packed).copy_(torch.where(here, own, torch.zeros_like(own)))
        local = ids.index_select(0, route.token) % trip.experts_there
        layout.ids(packed).copy_(torch.where(here, local, trip.experts_there))
        trip.there = _start(packed, route, home=False)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        trip = ctx.trip
        packed = _land(trip.back)
        layout, trip.back = trip.layout._replace(with_ids=False), None
        # summed in fp32 at least, rounded once
        wide = torch.promote_types(layout.dtype, torch.float32)
        x = _sum_parts(layout.hidden(packed), trip.route, wide).to(layout.dtype)
        weights = layout.weights(packed).gather(0, trip.route.row_of_slot)
        return x, weights, None, None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tie: Tensor, trip: Trip) -> tuple[Tensor, Tensor, Tensor]:
        ctx.trip = trip
        packed, layout = _land(trip.there)[:-1], trip.layout
        trip.there = None
        ids = layout.ids(packed).long()
        ctx.mark_non_differentiable(ids)
        # weights are kept for the backward and must not keep the rows alive: a copy
        return layout.hidden(packed), layout.weights(packed).contiguous(), ids

    @staticmethod
    def backward(ctx: Any, x: Tensor, weights: Tensor, _: Tensor) -> tuple[Tensor, None]:
        trip = ctx.trip
        layout = trip.layout._replace(with_ids=False)
        packed = torch.empty(x.size(0), layout.num_bytes, dtype=torch.uint8, device=x.device)
        layout.hidden(packed).copy_(x)
        layout.weights(packed).copy_(weights)
        trip.back = _start(packed, trip.route, home=True)
        return x.new_empty(0), None


class _DepartHome(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sums: Tensor, trip: Trip) -> Tensor:
        ctx.trip = trip
        trip.there = _start(sums.to(trip.layout.dtype).contiguous(), trip.route, home=True)
        return sums.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        rows, ctx.trip.back = _land(ctx.trip.back)[:-1], None
        return rows.to(ctx.trip.dtype), None


class _ArriveHome(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tie: Tensor, trip: Trip) -> Tensor:
        ctx.trip = trip
        rows, trip.there = _land(trip.there), None
        return _sum_parts(rows, trip.route, trip.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        trip = ctx.trip
        rows = grad.to(trip.layout.dtype).index_select(0, trip.route.token)
        trip.back = _start(rows, trip.route, home=False)
        return grad.new_empty(0), None
