"""Instances that a run leaves out: windows of the stream, and the positions of the rest.

N   positions of a call
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from forge_data._shared.problems import Problem, invalid

__all__ = ["Ledger"]

_LAST_ID = 2**61  # ids are int64, and positions and windows add up


class Ledger:
    """Windows of instance ids, both ends included, that no batch contains.

    The instances that remain are numbered from 0 without gaps: `ids(positions)` maps those numbers, int64
    (N,), to instance ids. Without windows both are the same. Windows that touch become one. Raises ValueError for
    an invalid window.
    Usage: `Ledger([(8, 11)]).ids(np.arange(10))` ends with 7, 12, 13.
    """

    def __init__(self, windows: Sequence[Sequence[int]] = ()) -> None:
        self._set([(first, last) for first, last in windows])

    @property
    def windows(self) -> list[tuple[int, int]]:
        """(first, last) of each window, in order; they neither overlap nor touch."""
        return [(int(first), int(last)) for first, last in zip(self._first, self._last)]

    def add(self, first: int, last: int) -> None:
        """Leave out `first .. last`. Raises ValueError for an invalid window."""
        self._set([*self.windows, (first, last)])

    def ids(self, positions: Any) -> np.ndarray:
        """The instances (N,) at positions (N,) among those that remain; O(N log windows)."""
        positions = np.asarray(positions, dtype=np.int64)
        # "right", as the first position after a window has passed it
        before = np.searchsorted(self._position, positions, side="right")
        ids: np.ndarray = positions + self._passed[before]
        return ids

    def position(self, instance: int) -> int:
        """How many instances below this one remain: the position of it, or of the next one that remains."""
        # windows that begin below it; one may hold it, hence `beyond`
        passed = int(np.searchsorted(self._first, instance))
        if not passed:
            return instance
        beyond = max(0, int(self._last[passed - 1]) + 1 - instance)
        return instance - (int(self._passed[passed]) - beyond)

    def _set(self, windows: list[tuple[int, int]]) -> None:
        for first, last in windows:
            if (
                type(first) is not int
                or type(last) is not int
                or not 0 <= first <= last <= _LAST_ID
            ):
                rule = f"must be two integers from 0 to {_LAST_ID}, the first not after the last"
                raise invalid("window", "range", (first, last), rule, "give ids of the stream")

        merged: list[tuple[int, int]] = []
        for first, last in sorted(windows):
            if merged and first <= merged[-1][1] + 1:
                merged[-1] = merged[-1][0], max(merged[-1][1], last)
            else:
                merged.append((first, last))
        self._first = np.array([first for first, _ in merged], dtype=np.int64)
        self._last = np.array([last for _, last in merged], dtype=np.int64)
        #: instances left out by the first k windows, (windows + 1,), so that 0 windows leave out 0
        self._passed = np.concatenate(
            [np.zeros(1, np.int64), np.cumsum(self._last - self._first + 1)]
        )
        #: position of the first instance after each window; it rises, so that it can be searched
        self._position = self._first - self._passed[:-1]


def window_problems(windows: Any) -> Iterator[Problem]:
    """Problems of saved windows; the first makes others meaningless."""
    fix = "load another checkpoint"
    if not isinstance(windows, list):
        yield Problem("skipped", "type", windows, "must be a list", fix)
    for window in windows:
        good = isinstance(window, list) and len(window) == 2 and all(type(i) is int for i in window)
        if not good or not 0 <= window[0] <= window[1] <= _LAST_ID:
            yield Problem("skipped", "range", window, "must be two instance ids in order", fix)
    if [list(window) for window in Ledger(windows).windows] != windows:
        yield Problem("skipped", "order", windows, "must be windows in order and apart", fix)
