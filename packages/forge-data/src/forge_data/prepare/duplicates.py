"""Documents with the text of an earlier one, found by digests of 128 bits in 8 bytes of memory a document."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

__all__ = ["find_duplicates"]


def find_duplicates(tables: Callable[[], Iterable[np.ndarray]], num_documents: int) -> np.ndarray:
    """Positions of the documents whose digest an earlier document has, rising, (num_duplicates,) int64.

    `tables()` gives the digests of all documents in order, as arrays of 16 bytes an item; it is called
    twice. Memory: 8 bytes a document, and about 60 for each that shares its first 64 bits with another.
    """
    prefixes = np.empty(num_documents, np.uint64)
    at = 0
    for table in tables():
        prefixes[at : at + len(table)] = _halves(table)[:, 0]
        at += len(table)
    assert at == num_documents
    prefixes.sort()
    shared = np.unique(prefixes[1:][prefixes[1:] == prefixes[:-1]])
    del prefixes
    # Few documents share half a digest: only those are compared whole.
    halves, positions, at = [np.empty((0, 2), np.uint64)], [np.empty(0, np.int64)], 0
    for table in tables():
        found = _halves(table)
        if len(shared):
            where = np.minimum(np.searchsorted(shared, found[:, 0]), len(shared) - 1)
            candidates = np.flatnonzero(shared[where] == found[:, 0])
            halves.append(found[candidates])
            positions.append(candidates + at)
        at += len(table)
    return _later(np.concatenate(halves), np.concatenate(positions))


def _halves(table: np.ndarray) -> np.ndarray:
    """Digests as (n, 2) uint64."""
    return np.ascontiguousarray(table).view(np.uint64).reshape(-1, 2)


def _later(digests: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Positions of digests (n, 2) that are equal to one at an earlier position; `positions` rise."""
    order = np.lexsort((positions, digests[:, 1], digests[:, 0]))
    ranked = digests[order]
    same = (ranked[1:] == ranked[:-1]).all(axis=1)
    return np.sort(positions[order[1:][same]])
