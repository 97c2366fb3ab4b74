"""The shared topic `sharded_rows`, by the copy of one package; both packages compare their rows with a list of their own."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from forge_data._shared.problems import invalid
from forge_data._shared.sharded_rows import ShardedRows
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

SIZES = (4, 0, 7, 1, 3)


class Pairs(ShardedRows):
    """Rows of two items or fewer; items are (piece, number), and every third of them gives no row."""

    def __init__(self, shards: int, window: int, sizes: Sequence[int] = SIZES) -> None:
        self.sizes, self.opened = sizes, 0
        super().__init__(len(sizes), shards, window)

    def _order(self, name: str, count: int, epoch: int) -> np.ndarray:
        order = list(range(count))
        random.Random(f"{name} {epoch}").shuffle(order)
        return np.array(order)

    def _items(self, piece: int, start: int) -> Iterator[tuple[int, Any]]:
        self.opened += 1
        return ((n, (piece, n)) for n in range(start, self.sizes[piece]))

    def _pack(self, shard: int, place: int, items: Sequence[Any]) -> list[Any]:
        kept = [item for item in items if item[1] % 3]
        return [(place, kept[i : i + 2]) for i in range(0, len(kept), 2)]

    def _no_rows(self, shard: int, pieces: Sequence[int]) -> Exception:
        return invalid("shard", "empty", shard, f"has pieces {pieces}")  # type: ignore[no-any-return]


def rows_of(stream: Pairs, ids: Sequence[int]) -> list[Any]:
    return stream.read_rows(np.array(ids), lambda rows, n: rows[n])[0]


def listed(stream: Pairs, shard: int, window: int, epochs: int) -> list[Any]:
    """The slow obvious list of the rows of a shard."""
    pieces, rows = stream._order("pieces", len(SIZES), 0)[shard :: stream.num_shards], []
    for epoch in range(epochs):
        order = stream._order(f"shard {shard}", len(pieces), epoch)
        turns = [(epoch * len(pieces) + k, pieces[i]) for k, i in enumerate(order)]
        items = [((turn << 32) + n, (int(p), n)) for turn, p in turns for n in range(SIZES[p])]
        for at in range(0, len(items), window):
            batch = items[at : at + window]
            rows += stream._pack(shard, batch[0][0], [item for _, item in batch])
    return rows


@pytest.mark.parametrize(("shards", "window"), [(1, 3), (2, 4), (2, 100)])
def test_rows_are_those_of_the_obvious_list_from_any_place(shards: int, window: int) -> None:
    stream = Pairs(shards, window)
    want = [listed(stream, shard, window, 9) for shard in range(shards)]
    ids = list(range(shards * min(map(len, want))))
    wanted = [want[i % shards][i // shards] for i in ids]
    _, places = stream.read_rows(np.array(ids), lambda rows, n: rows[n])
    assert rows_of(stream, ids) == wanted
    assert rows_of(stream, ids[::-1]) == wanted[::-1]

    for stop in (1, len(ids) // 2, len(ids) - 1):
        table = np.zeros((shards, 2), np.int64)
        np.maximum.at(table, places[:stop, 0], places[:stop, 1:])
        resumed = pickle.loads(pickle.dumps(Pairs(shards, window)))
        resumed.load_places(table)
        assert rows_of(resumed, ids[stop : stop + 1]) == wanted[stop : stop + 1]
        assert resumed.opened <= 2 * len(SIZES)
        assert rows_of(resumed, ids) == wanted  # those before it, too


def test_a_shard_without_rows_is_an_error_each_time() -> None:
    stream = Pairs(2, 3, sizes=(1, 1))
    for _ in range(2):
        with rejects("shard", 0, "empty"):
            rows_of(stream, [0])


class Failing(Pairs):
    """Cannot be read while `broken`."""

    broken = False

    def _items(self, piece: int, start: int) -> Iterator[tuple[int, Any]]:
        for item in super()._items(piece, start):
            if self.broken:
                raise OSError("a disk that is away")
            yield item


def test_rows_that_could_not_be_read_are_read_later() -> None:
    stream, wanted = Failing(2, 3), rows_of(Pairs(2, 3), range(20))
    assert rows_of(stream, [0, 1]) == wanted[:2]
    stream.broken = True
    for _ in range(2):
        with pytest.raises(OSError, match="a disk"):  # prose: of this test
            rows_of(stream, [18])
    stream.broken = False
    assert rows_of(stream, range(20)) == wanted
