"""Which samples share a row: a function of their lengths alone. No sample is cut.

N   samples        R   rows
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort

import numpy as np

__all__ = ["PACKING_VERSION", "grouped_order", "order_of", "plan_rows"]

PACKING_VERSION = 1  # part of every fingerprint: raise it whenever a plan or an order would change

_WINDOW = 4096  # samples that are looked at together


def plan_rows(lengths: np.ndarray, seq_len: int, pack: bool) -> list[np.ndarray]:
    """Rows as numbers of samples, of lengths (N,) up to `seq_len`: best-fit of decreasing lengths in windows of the
    order of the files, or each sample alone."""
    if not pack:
        return [np.array([i]) for i in range(len(lengths))]
    rows = []
    for first in range(0, len(lengths), _WINDOW):
        rows += _window(lengths[first : first + _WINDOW], first, seq_len)
    return rows


def _window(lengths: np.ndarray, first: int, seq_len: int) -> list[np.ndarray]:
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # of each row that is not full, sorted
    for sample in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[sample])
        at = bisect_left(room, (length, -1))
        if at == len(room):
            rows.append([])
            left, row = seq_len, len(rows) - 1
        else:
            left, row = room.pop(at)
        rows[row].append(sample)
        if left > length:
            insort(room, (left - length, row))
    return [np.sort(np.array(row)) + first for row in rows]


def order_of(count: int, seed: int, epoch: int) -> np.ndarray:
    """The order of an epoch, a permutation (count,) that is the same on every machine and version: by a hash of each
    number (splitmix64, Steele et al. 2014)."""
    key = hashlib.sha256(f"forge-vlm order 1:{seed}:{epoch}".encode()).digest()[:8]
    x = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x ^= np.uint64(int.from_bytes(key, "little"))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return np.argsort(x ^ (x >> np.uint64(31)), kind="stable")


def grouped_order(
    lengths: np.ndarray, pictured: np.ndarray, size: int, seed: int, epoch: int
) -> np.ndarray:
    """The order of an epoch whose batches of `size` rows have pictures in all of them, or in none, the longest row first
    (LLaVA, Liu et al. 2023): a permutation (R,) of rows of lengths (R,), `pictured` (R,) bool.

    Rows are drawn and batches shuffled by (seed, epoch). What is left of both kinds stands together at the end.
    """
    drawn = order_of(len(lengths), seed, epoch)
    batches, rest = [], []
    for kind in (drawn[pictured[drawn]], drawn[~pictured[drawn]]):
        whole = len(kind) // size * size
        batches += list(kind[:whole].reshape(-1, size))
        rest.append(kind[whole:])
    shuffled = [batches[i] for i in order_of(len(batches), seed, ~epoch)]  # not the order of rows
    every = [*shuffled, np.concatenate(rest)]
    return np.concatenate([batch[np.argsort(-lengths[batch], kind="stable")] for batch in every])
