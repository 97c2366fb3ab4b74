"""Tiles of attention in a sliding window: the band below the diagonal, cut so that kernels know every tile.

A query at position p sees the keys p - window + 1 to p. Queries are taken in runs of at most `window`. The keys
that the last query of a run has left behind and the first has not are a triangle: the later the query, the fewer it
sees. With queries and keys both read backwards that triangle is the causal one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from forge_parallel.axes.tiles import Tile


class Keys(NamedTuple):
    """Keys [low, high) of a row, of which the first lies at `at` in the tensor; those of one part have one `turn`."""

    low: int
    high: int
    at: int
    turn: int = 0


class Queries(NamedTuple):
    """Queries [first, first + size) of a row, of which the first lies at `at` in the tensor; row None: every row."""

    row: int | None
    first: int
    size: int
    at: int


def own_tiles(queries: Queries, window: int) -> Iterator[Tile]:
    """Tiles of queries with the keys at their own positions."""
    for run in _runs(queries, window):
        yield Tile(run.row, run.at, run.size, run.at, run.size, True)
        yield from _band(run, Keys(queries.first, run.first, queries.at), window)


def earlier_tiles(queries: Queries, keys: Keys, window: int) -> Iterator[Tile]:
    """Tiles of queries with keys that are all before the first of them."""
    for run in _runs(queries, window):
        yield from _band(run, keys, window)


def _runs(queries: Queries, window: int) -> Iterator[Queries]:
    for begin in range(0, queries.size, window):
        size = min(window, queries.size - begin)
        yield Queries(queries.row, queries.first + begin, size, queries.at + begin)


def _band(run: Queries, keys: Keys, window: int) -> Iterator[Tile]:
    """Tiles of one run: of each query the keys from `first` on, its own distance to the run's begin added."""
    first = run.first - window + 1
    whole = max(keys.low, first + run.size - 1)  # from here on every query of the run sees them
    low, high = max(keys.low, first), min(keys.high, whole)
    edge = max(0, high - low)  # width of the triangle
    ahead = low - first if edge else 0  # queries before the triangle, which see all of it

    def full(begin: int, end: int, key: int) -> Iterator[Tile]:
        if begin < end and key < keys.high:
            at, size = keys.at + key - keys.low, keys.high - key
            yield Tile(run.row, run.at + begin, end - begin, at, size, False, turn=keys.turn)

    yield from full(0, ahead, low)
    yield from full(ahead, run.size, whole)
    if edge:
        at = keys.at + low - keys.low
        yield Tile(run.row, run.at + ahead, edge, at, edge, True, True, keys.turn)
