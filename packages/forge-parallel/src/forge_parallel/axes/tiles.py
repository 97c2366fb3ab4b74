"""Tiles of the (query, key) square of attention, and the batches in which kernels run them.

Shapes: B rows, S tokens of a row; N runs of L tokens in one call, T = N L.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forge_parallel._torch_compat import Borders


class Tile(NamedTuple):
    """Queries [query, query + queries) of a row see its keys [key, key + keys), all or causally.

    row None: so in every row. A causal tile has as many keys as queries; `backwards` it is causal from the last
    query and key to the first: each query sees the key of its own number and those behind it.
    """

    row: int | None
    query: int
    queries: int
    key: int
    keys: int
    causal: bool
    backwards: bool = False
    turn: int = 0  # tiles of different turns never run in one call


class Runs:
    """Runs (row, start, length) of tokens that are read from and written to tensors (B, S, ...), or `backwards`.

    Read, they are (N, L, ...) if all have one length, else concatenated, (1, T, ...). A single run of row None is a
    slice of all rows, and without a copy if it is not read backwards.
    """

    def __init__(
        self, runs: Sequence[tuple[int | None, int, int]], backwards: bool = False
    ) -> None:
        self.runs = tuple(runs)
        self.backwards = backwards
        self.lengths = [length for _, _, length in runs]
        self.everywhere = runs[0][0] is None
        self._indices: dict[Any, Tensor] = {}

    def _index(self, x: Tensor) -> Tensor:
        """Positions (T,) in the flattened rows of x; one copy to its device."""
        key = (x.device, x.size(1))
        if key not in self._indices:
            starts = ((row or 0) * x.size(1) + start for row, start, _ in self.runs)
            spans = [self._turned(torch.arange(s, s + n), 0) for s, n in zip(starts, self.lengths)]
            self._indices[key] = torch.cat(spans).to(x.device, non_blocking=True)
        return self._indices[key]

    def _turned(self, x: Tensor, dim: int) -> Tensor:
        return x.flip(dim) if self.backwards else x

    def _slice(self, x: Tensor) -> Tensor:
        _, start, length = self.runs[0]
        return x.narrow(1, start, length)

    def take(self, x: Tensor) -> Tensor:
        """x (B, S, ...) -> (N, L, ...)."""
        if self.everywhere:
            return self._turned(self._slice(x), 1)
        flat = x.flatten(0, 1).index_select(0, self._index(x))
        same = len(set(self.lengths)) == 1
        return flat.unflatten(0, (len(self.runs), -1) if same else (1, -1))

    def put(self, x: Tensor, values: Tensor) -> None:
        """Write values (N, L, ...) to their positions in x; positions must be distinct."""
        if self.everywhere:
            self._slice(x).copy_(self._turned(values, 1))
        else:
            x.view(-1, *x.shape[2:]).index_copy_(0, self._index(x), values.flatten(0, 1))

    def add(self, x: Tensor, values: Tensor) -> None:
        """Add values (N, L, ...) at their positions in x."""
        if self.everywhere:
            self._slice(x).add_(self._turned(values, 1))
        else:
            x.view(-1, *x.shape[2:]).index_add_(0, self._index(x), values.flatten(0, 1).to(x.dtype))

    def borders(self, rows: int, device: torch.device) -> tuple[Tensor, int]:
        """Cumulative lengths (N + 1,) int32, and the longest; `rows` is the B of slices."""
        lengths = self.lengths * rows if self.everywhere else self.lengths
        key = ("borders", device, len(lengths))
        if key not in self._indices:
            ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
            self._indices[key] = ends.to(device, non_blocking=True)
        return self._indices[key], max(lengths)


class TileBatch:
    """Tiles that run in one kernel call."""

    def __init__(self, tiles: Sequence[Tile]) -> None:
        self.causal = tiles[0].causal
        backwards = tiles[0].backwards
        self.queries = Runs([(p.row, p.query, p.queries) for p in tiles], backwards)
        self.keys = Runs([(p.row, p.key, p.keys) for p in tiles], backwards)

    def borders(self, rows: int, device: torch.device) -> Borders:
        (queries, longest), (keys, most) = (
            runs.borders(rows, device) for runs in (self.queries, self.keys)
        )
        return queries, keys, longest, most


class Tiling:
    """The tiles of each part; a part has keys of its own. Host integers, made once per forward.

    In one turn of a part a query may be in one full tile, one causal one, and one that is causal backwards.
    """

    def __init__(self, parts: Sequence[Sequence[Tile]]) -> None:
        self.parts = tuple(tuple(part) for part in parts)
        self._groups: dict[tuple[int, bool], list[TileBatch]] = {}

    def groups(self, part: int, ragged: bool) -> list[TileBatch]:
        """Kernel calls of a part: one per kind and shape, or with `ragged` one per kind."""
        key = (part, ragged)
        if key not in self._groups:
            alike: dict[Any, list[Tile]] = {}
            for tile in self.parts[part]:
                shape = () if ragged else (tile.queries, tile.keys)
                kind: Any = tile
                if tile.row is not None:
                    kind = (tile.causal, tile.backwards, tile.turn, *shape)
                alike.setdefault(kind, []).append(tile)
            self._groups[key] = [TileBatch(tiles) for tiles in alike.values()]
        return self._groups[key]
