"""Sets of instants as sorted lists of disjoint (start, end)."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]
Intervals = list[Interval]


def union(intervals: Iterable[Interval]) -> Intervals:
    """The instants in any of `intervals`, which may overlap and come in any order."""
    found: Intervals = []
    for start, end in sorted(i for i in intervals if i[1] > i[0]):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """The instants in both of two disjoint sorted lists. Cost: their length."""
    found: Intervals = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            found.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """The instants in `a` and not in `b`."""
    if not a:
        return []
    low, high = a[0][0], a[-1][1]
    gaps, cursor = [], low
    for start, end in b:
        gaps.append((cursor, min(start, high)))
        cursor = end
    gaps.append((cursor, high))
    return intersect(a, [(start, end) for start, end in gaps if start < end])


def length(intervals: Intervals) -> float:
    """Sum of the lengths."""
    return sum(end - start for start, end in intervals)
