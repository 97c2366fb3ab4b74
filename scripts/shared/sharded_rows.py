"""The endless stream of rows of files that are read front to back, without an index of what they hold.

V   virtual shards        P   pieces of the files        N   sample indices of a call
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

__all__ = ["PLACES", "ShardedRows", "Window"]

#: Name under which a sharded stream gives, for each row, its shard and the place of its window: int64 (N, 3).
PLACES = "shard_places"
_ITEM_BITS = (
    32  # of a place: turn << 32 | number of the item, so that it rises while the shard is read
)


class Window(NamedTuple):
    """Rows that were packed together: the first one's number in the shard, and where their items begin."""

    first: int
    place: int
    rows: Any  # with a length


class ShardedRows:
    """Base of a stream whose sample index i is row `i // V` of shard `i % V`.

    The P pieces are dealt out to V = min(virtual_shards, P) shards by `_order`. A shard reads its pieces in another order
    in each of its epochs, and takes `shuffle_window` items at a time, which `_pack` makes rows of. When its pieces end,
    its next epoch begins: an epoch is one of a shard, in which every item comes once. `len` raises TypeError.

    A row costs nothing within the window that was read last, and forward the windows up to it; `load_places` says where
    to begin. Each shard that this process reads holds one window. Threads may read at the same time, one after another.
    A class that derives from it defines `_order`, `_items`, `_pack` and `_no_rows`, and what they need before its
    `super().__init__`.
    """

    def __init__(self, num_pieces: int, virtual_shards: int, shuffle_window: int) -> None:
        self.num_shards, self.shuffle_window = min(virtual_shards, num_pieces), shuffle_window
        self._dealt = self._order("pieces", num_pieces, 0)  # (P,); shard v has every V-th from v on
        self._lock = threading.Lock()  # a thread that read ahead may still read when another begins
        self.load_places(np.zeros((self.num_shards, 2), np.int64))

    def _order(self, name: str, count: int, epoch: int) -> np.ndarray:
        """A permutation (count,) by the seed, a name and an epoch."""
        raise NotImplementedError

    def _items(self, piece: int, start: int) -> Iterator[tuple[int, Any]]:
        """(number in the piece, item) of a piece, from number `start` on."""
        raise NotImplementedError

    def _pack(self, shard: int, place: int, items: Sequence[Any]) -> Any:
        """The rows of the items of a window, with a length; their order is by the seed, the shard and the place."""
        raise NotImplementedError

    def _no_rows(self, shard: int, pieces: Sequence[int]) -> Exception:
        """The error of a shard of which a full epoch had no row: it would be read for ever."""
        raise NotImplementedError

    def __len__(self) -> int:
        raise TypeError(
            f"{type(self).__name__}.__len__: rows of a streaming source are known when they are read; give a number of "
            "sample indices, or prepare the files"
        )

    def shards_of(self, sample_ids: np.ndarray) -> np.ndarray:
        """The shard (N,) of each sample index."""
        shards: np.ndarray = np.asarray(sample_ids, np.int64) % self.num_shards
        return shards

    def load_places(self, table: np.ndarray) -> None:
        """Begin each shard at its place (V, 2), as PLACES gave them last; rows before are read from the start."""
        with self._lock:
            self._table = np.array(table, np.int64)
            self._shards: dict[int, tuple[Window, Iterator[Window]]] = {}

    def read_rows(
        self, sample_ids: np.ndarray, row: Callable[[Any, int], Any]
    ) -> tuple[list[Any], np.ndarray]:
        """`row(rows of its window, number there)` of each sample index, and PLACES (N, 3)."""
        ids = np.asarray(sample_ids, np.int64)
        found: list[Any] = [None] * len(ids)
        places = np.zeros((len(ids), 3), np.int64)
        with self._lock:
            for i in np.argsort(ids, kind="stable"):
                number, shard = divmod(int(ids[i]), self.num_shards)
                window = self._window(shard, number)
                found[i] = row(window.rows, number - window.first)
                places[i] = shard, window.first, window.place
        return found, places

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_lock": None, "_shards": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def _window(self, shard: int, row: int) -> Window:
        """The window of a shard that has a row."""
        # taken out: a generator that raises has ended, and another begins at the same place
        held = self._shards.pop(shard, None)
        if held is None or row < held[0].first:
            first, place = map(int, self._table[shard])
            if row < first:  # before what was loaded
                first = place = 0
            windows = self._windows(shard, first, place)
            held = next(windows), windows

        window, windows = held
        while row >= window.first + len(window.rows):
            window = next(windows)
        self._shards[shard] = window, windows
        return window

    def _windows(self, shard: int, first: int, place: int) -> Iterator[Window]:
        """The windows of a shard, from the one on that begins at `place` and has row `first`; without end."""
        pieces = self._dealt[shard :: self.num_shards]
        turn, start = place >> _ITEM_BITS, place & ((1 << _ITEM_BITS) - 1)
        while True:  # an epoch of the shard, or the rest of one
            complete, before = turn % len(pieces) == 0 and start == 0, first
            items = self._epoch(shard, pieces, turn, start)
            while batch := list(islice(items, self.shuffle_window)):
                place = batch[0][0]
                rows = self._pack(shard, place, [item for _, item in batch])
                if len(rows):
                    yield Window(first, place, rows)
                    first += len(rows)

            if complete and first == before:
                raise self._no_rows(shard, pieces.tolist())
            turn, start = (turn // len(pieces) + 1) * len(pieces), 0

    def _epoch(
        self, shard: int, pieces: np.ndarray, turn: int, start: int
    ) -> Iterator[tuple[int, Any]]:
        """(place, item) from a place to the end of its epoch."""
        epoch = turn // len(pieces)
        order = self._order(f"shard {shard}", len(pieces), epoch)
        for k in range(turn, (epoch + 1) * len(pieces)):
            for number, item in self._items(int(pieces[order[k % len(pieces)]]), start):
                yield k << _ITEM_BITS | number, item
            start = 0
