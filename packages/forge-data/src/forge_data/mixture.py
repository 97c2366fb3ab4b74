"""Which source each instance of a mixture is from: a function of its number, in closed form.

Shares are integers of 2^30. Instances are dealt in blocks of B; source k has C_k(b) instances in the first b blocks,
cumulative shares rounded, so that counts never drift: |C_k(b) - share_k b B| < 1. Inside of a block the instances of
each source are spread evenly. A new segment begins where shares change: at a phase, and where a source has had
its last epoch; the others then share what it had.

    N   instances of a call     K   sources     B   instances of a block
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from forge_data._shared.problems import invalid
from forge_data.errors import InvalidData

__all__ = ["Mixture", "Phase", "integer_shares"]

MIXTURE_VERSION = 1  # part of every fingerprint: raise it whenever an assignment would change
_ONE = 1 << 30
#: A share is at least 2^-19, so that a block of at most 2^20 has two instances of each source.
_LARGEST_BLOCK, _SMALLEST_BLOCK = 1 << 20, 1 << 8
_END = 1 << 62


class Phase(NamedTuple):
    """From instance `start` on sources have these weights, any numbers of at least 0; `name` is for errors."""

    start: int
    weights: tuple[float, ...]
    name: str = ""


class Mixture:
    """Assigns instances to K sources.

        mixture = Mixture([Phase(0, (3.0, 1.0))], [None, 2000])
        sources, own = mixture.locate(np.arange(8))         # 0 0 1 0 0 0 1 0; instance of that source

    `limits` are the most instances of each source (None: endless). Each source's own instances come in order, each
    once. `end` is the number of instances there are, None without end: it comes where no source of a phase is left. Cost of `locate`: O(N) and O(B) for a block that
    was not there lately, at any distance.

    Raises ValueError for weights that are no shares, or a share below 2^-19, with the name of the source; InvalidData in `locate`
    for an instance behind the end, to which windows that a run left out may lead.
    """

    def __init__(
        self, phases: Sequence[Phase], limits: Sequence[int | None], names: Sequence[str] = ()
    ) -> None:
        self._segments: list[_Segment] = []
        self.end: int | None = None
        _check(phases, names or [str(number) for number in range(len(limits))])
        given = [0] * len(limits)

        for number, phase in enumerate(phases):
            until = phases[number + 1].start if number + 1 < len(phases) else None
            start = phase.start
            while self.end is None and (until is None or start < until):
                weights = [
                    weight if limit is None or count < limit else 0.0
                    for weight, limit, count in zip(phase.weights, limits, given)
                ]
                if not any(weights):
                    self.end = start
                    break

                segment = _Segment(start, tuple(given), _Dealer(integer_shares(weights)))
                self._segments.append(segment)
                stop = min((segment.exhausted(limits), _END if until is None else until))
                if stop == _END:
                    break
                start, given = stop, segment.counts(stop)
        self._starts = [segment.start for segment in self._segments]

    def locate(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source (N,), its own instance (N,)), both int64, of instances (N,)."""
        ids = np.asarray(ids, dtype=np.int64)
        if ids.size and (ids.min() < 0 or ids.max() >= (_END if self.end is None else self.end)):
            rule = f"must be within 0..{(self.end or _END) - 1}, where the last source has had its last epoch"
            found, fix = (int(ids.min()), int(ids.max())), "raise max_epochs, or train less"
            raise invalid("instances", "range", found, rule, fix, kind=InvalidData)
        sources, own = np.empty_like(ids), np.empty_like(ids)
        number = np.searchsorted(self._starts, ids, side="right") - 1
        for segment in np.unique(number):
            chosen = number == segment
            sources[chosen], own[chosen] = self._segments[segment].locate(ids[chosen])
        return sources, own

    def counts(self, position: int) -> list[int]:
        """How many of the first `position` instances are from each source."""
        return self._segments[bisect_right(self._starts, position) - 1].counts(position)


class _Segment(NamedTuple):
    """Instances from `start` on, dealt in one way; `given` are those of each source before."""

    start: int
    given: tuple[int, ...]
    dealer: _Dealer

    def locate(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        blocks, within = np.divmod(ids - self.start, self.dealer.block)
        sources, own = np.empty_like(ids), np.empty_like(ids)
        for block in np.unique(blocks):
            chosen = blocks == block
            before, order = self.dealer.dealt(int(block))
            sources[chosen] = order.sources[within[chosen]]
            own[chosen] = order.ranks[within[chosen]]
            own[chosen] += np.array(before, np.int64)[sources[chosen]]
        return sources, own + np.array(self.given, np.int64)[sources]

    def counts(self, position: int) -> list[int]:
        block, within = divmod(position - self.start, self.dealer.block)
        before, order = self.dealer.dealt(block)
        inside = np.bincount(order.sources[:within], minlength=len(before))
        return [g + b + int(i) for g, b, i in zip(self.given, before, inside)]

    def exhausted(self, limits: Sequence[int | None]) -> int:
        """The first instance that would be one too many of a source."""
        found = [
            self.dealer.position(source, limit - self.given[source])
            for source, limit in enumerate(limits)
            if limit is not None and self.dealer.shares[source]
        ]
        return min((self.start + each for each in found), default=_END)


class _Order(NamedTuple):
    """The instances of a block: source (B,), and how many of the same source are before in the block (B,)."""

    sources: np.ndarray
    ranks: np.ndarray


class _Dealer:
    """Shares, and the blocks in which instances are dealt by them."""

    def __init__(self, shares: tuple[int, ...]) -> None:
        self.shares = shares
        self._cumulative = [sum(shares[: k + 1]) for k in range(len(shares))]
        least = min(share for share in shares if share)
        self.block = _SMALLEST_BLOCK
        while self.block * least < 2 * _ONE:
            self.block *= 2

    def dealt(self, block: int) -> tuple[list[int], _Order]:
        """(instances of each source in the blocks before, the order of this one)."""
        before, after = self._counts(block), self._counts(block + 1)
        return before, _order(tuple(b - a for a, b in zip(before, after)))

    def position(self, source: int, count: int) -> int:
        """Where the instance stands that has `count` of the same source before it."""
        low, high = 0, 1
        while self._counts(high)[source] <= count:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._counts(middle)[source] <= count else (low, middle)
        before, order = self.dealt(low)
        inside = (order.sources == source) & (order.ranks == count - before[source])
        return low * self.block + int(np.flatnonzero(inside)[0])

    def _counts(self, blocks: int) -> list[int]:
        """Of each source in so many blocks: cumulative shares rounded, so that they add up."""
        edges = [(2 * c * blocks * self.block + _ONE) // (2 * _ONE) for c in self._cumulative]
        return [edge - before for edge, before in zip(edges, [0, *edges])]


@lru_cache(maxsize=64)
def _order(counts: tuple[int, ...]) -> _Order:
    """So many instances of each source, each spread evenly over the block."""
    sources = np.repeat(np.arange(len(counts)), counts)  # (B,)
    ranks = np.concatenate([np.arange(count) for count in counts])
    places = (ranks + 0.5) / np.repeat(np.maximum(counts, 1), counts)
    order = np.argsort(places, kind="stable")
    return _Order(sources[order], ranks[order])


def integer_shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Weights as shares of 2^30 that add up to it."""
    # Powers of two change no share, and keep the sum of the largest weights finite.
    _, exponent = math.frexp(max(weights))
    reached = list(accumulate((math.ldexp(weight, -exponent) for weight in weights), initial=0.0))
    edges = [round(each / reached[-1] * _ONE) for each in reached]
    return tuple(b - a for a, b in pairwise(edges))


def _check(phases: Sequence[Phase], names: Sequence[str]) -> None:
    starts = [phase.start for phase in phases]
    if not starts or starts[0] != 0 or any(a >= b for a, b in pairwise(starts)):
        raise invalid("phases", "order", starts, "must start at 0 and rise", "put them in order")
    for phase in phases:
        good = len(phase.weights) == len(names) and all(
            0.0 <= w < float("inf") for w in phase.weights
        )
        if not good or not any(phase.weights):
            rule = (
                f"must be one for each of {len(names)} sources, finite, at least 0, and one above 0"
            )
            raise invalid("weights", "range", phase.weights, rule, "correct them")

        for name, weight, share in zip(names, phase.weights, integer_shares(phase.weights)):
            if weight > 0.0 and share * _LARGEST_BLOCK < 2 * _ONE:
                key = (
                    f"phases.{phase.name}.weights.{name}"
                    if phase.name
                    else f"sources.{name}.weight"
                )
                rule = "must be at least 2^-19 of the sum of weights, or almost no row of it would come"
                fix = "raise it, or use 0; without weights sources have their rows as weights, nearer to one another by a temperature above 1"
                raise invalid(key, "range", weight, rule, fix, where="data")
