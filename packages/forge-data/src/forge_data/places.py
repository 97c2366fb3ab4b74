"""Where the shards of a sharded stream stand: what a resume needs in addition to the cursor.

V   shards of the stream        N   instances of a call
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np

from forge_data._shared.problems import Problem
from forge_data._shared.sharded_rows import PLACES
from forge_data.protocols import ShardedStream, Stream

__all__ = ["PLACES", "Places"]

_LAST = 2**62


class Places:
    """For each shard two numbers, from 0: the first row of the window that was read last, and where the window begins.

    Both only rise while a run goes on, so that the maximum of the tables of all ranks is the table of the run.
    Usage: `places = Places(stream.num_shards); places.note(rows); state = places.state()`.
    """

    def __init__(self, num_shards: int, state: Sequence[Sequence[int]] = ()) -> None:
        self.table = np.zeros((num_shards, 2), np.int64)  # (V, 2)
        for shard, *place in state:
            self.table[shard] = place

    def note(self, rows: Any) -> None:
        """Take the places (N, 3) of rows that were read; shard -1 is a row of no shard."""
        rows = np.asarray(rows)
        rows = rows[rows[:, 0] >= 0]
        np.maximum.at(self.table, rows[:, 0], rows[:, 1:])

    def state(self) -> list[list[int]]:
        """[shard, row, place] of each shard that has left its start, as JSON."""
        behind = np.flatnonzero(self.table.any(axis=1))
        return [[int(shard), *map(int, self.table[shard])] for shard in behind]


def places_problems(state: Any, num_shards: int) -> Iterator[Problem]:
    """Problems of saved cursors of `num_shards` shards; the first makes others meaningless."""
    fix = "load another checkpoint"
    if not isinstance(state, list):
        yield Problem(PLACES, "type", state, "must be a list", fix)
    for place in state:
        good = isinstance(place, list) and len(place) == 3 and all(type(i) is int for i in place)
        if not good or not 0 <= place[0] < num_shards or not 0 <= min(place) <= max(place) <= _LAST:
            rule = f"must be a shard below {num_shards}, a row and a place"
            yield Problem(PLACES, "range", place, rule, fix)


def num_shards_of(stream: Any) -> int:
    """Shards of a stream, 0 for an ordinary one, whose rows need no places."""
    return int(getattr(stream, "num_shards", 0))


def sharded(stream: Stream) -> ShardedStream | None:
    """The stream itself if it has shards."""
    return cast("ShardedStream", stream) if num_shards_of(stream) else None


def owners(stream: ShardedStream, instance_ids: np.ndarray, count: int) -> np.ndarray:
    """Which of `count` readers reads each instance (N,): each shard has one, the rest are dealt out."""
    shards = stream.shards_of(instance_ids)
    found: np.ndarray = np.where(shards < 0, instance_ids, shards) % count
    return found
