"""The order of an epoch: a keyed permutation of [0, n) that is computed, never stored.

A balanced Feistel network over 2k bits, the smallest even width that holds n, is a bijection of
[0, 4^k); walking its cycle until the value is under n makes it one of [0, n). Every operation is on
uint64, so the order is the same on every machine, and a seek costs the same at 10^12 as at 10.

    N   number of positions in a call

Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (CT-RSA 2002), section 4.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from forge_data._shared.problems import invalid

__all__ = ["ORDER_VERSION", "EpochOrder", "Permutation", "epochs_of"]

ORDER_VERSION = 1  # part of every fingerprint: raise it whenever an order would change
_ROUNDS = 12
_MAX_N = 1 << 62
_BLOCK = 128  # positions of an epoch whose order is computed at once: fewer would take as long
_BLOCKS_AHEAD = 8


def epochs_of(instance_ids: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """(epoch, place in it), both (N,) int64, of sample indices (N,) with n an epoch. ValueError for one below 0."""
    ids = np.asarray(instance_ids, dtype=np.int64)
    if ids.size and ids.min() < 0:
        raise invalid("instance", "range", int(ids.min()), "must be at least 0", "count from 0")
    epochs, within = np.divmod(ids, n)
    return epochs, within


class Permutation:
    """The permutation of `[0, n)` that belongs to (seed, epoch).

    `permutation(positions)` maps int64 positions (N,) to int64 rows (N,); memory is O(N), whatever
    n is. Each position takes 12 rounds times at most 4 walks on average. Raises ValueError when n or
    a position is out of range. Usage: `Permutation(10**12, seed=0, epoch=3)(np.arange(4))`.
    """

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        if not 1 <= n <= _MAX_N:
            raise invalid(
                "n", "range", n, "must be between 1 and 2**62", "use a source with tokens in it"
            )
        self.n = n
        self._half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
        key = hashlib.shake_256(f"forge order {ORDER_VERSION}:{seed}:{epoch}".encode())
        self._keys = np.frombuffer(key.digest(8 * _ROUNDS), dtype="<u8").astype(np.uint64)

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        positions = np.asarray(positions, dtype=np.int64)  # (N,)
        if positions.size and not 0 <= positions.min() <= positions.max() < self.n:
            found = (int(positions.min()), int(positions.max()))
            rule = f"must be within 0..{self.n - 1}"
            raise invalid("positions", "range", found, rule, "take them modulo n")
        # Cycle walking: the network permutes [0, 4^k). From a value under n, repeated application comes
        # back to a value under n (at the latest to the first), and no two start values share it, so the
        # result is a permutation of [0, n). 4^k is under 4 n: at most 4 applications on average.
        rows = self._feistel(positions.astype(np.uint64))  # (N,)
        limit = np.uint64(self.n)
        outside = np.flatnonzero(rows >= limit)
        while outside.size:
            walked = self._feistel(rows[outside])
            rows[outside] = walked
            outside = outside[walked >= limit]
        return rows.astype(np.int64)

    def _feistel(self, x: np.ndarray) -> np.ndarray:
        """One pass of the network over values (N,) of 2k bits."""
        half = np.uint64(self._half_bits)
        mask = np.uint64((1 << self._half_bits) - 1)
        left, right = x >> half, x & mask
        # Each round is invertible whatever _mix is (the right half is still there), so that the network is
        # a bijection; the keys come from (seed, epoch), so that every epoch has an order of its own.
        for key in self._keys:
            left, right = right, left ^ (_mix(right + key) >> (np.uint64(64) - half))
        return (left << half) | right


class EpochOrder:
    """Rows with n an epoch: sample index i is row `permutation(seed, i // n)(i % n)`.

    Keeps the blocks of the last call and some ahead. Usage: `EpochOrder(1000, seed=0).rows(np.arange(8))`.
    """

    def __init__(self, n: int, seed: int) -> None:
        self._n, self._seed = n, seed
        self._permutation: tuple[int, Permutation] | None = (
            None  # that of the last call, as calls of one epoch follow each other
        )
        # (epoch, block) -> rows: kept, as the next steps read the rest of a block
        self._blocks: dict[tuple[int, int], np.ndarray] = {}

    def rows(self, instance_ids: np.ndarray) -> np.ndarray:
        """The rows (N,) of sample indices (N,)."""
        epochs, within = epochs_of(instance_ids, self._n)
        if epochs.size and epochs[0] == epochs.max() == epochs.min():
            return self._rows_of_epoch(int(epochs[0]), within)
        rows = np.empty_like(within)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            rows[chosen] = self._rows_of_epoch(int(epoch), within[chosen])
        return rows

    def __reduce__(self) -> tuple[Any, ...]:
        # without what was computed, as a copy can compute it again
        return EpochOrder, (self._n, self._seed)

    def _rows_of_epoch(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Rows at positions (N,) of an epoch."""
        first, last = int(positions.min()) // _BLOCK, int(positions.max()) // _BLOCK
        if last > first + 1:
            return self._order(epoch)(positions)
        # Of few positions a permutation takes as long as of a block, of which the next steps read the rest. Eight blocks
        # cost about two, and are taken where the one before them was read.
        wanted = [(epoch, block) for block in range(first, last + 1)]
        # a copy, as a thread that read ahead may still read when another begins
        blocks = {k: v for k, v in self._blocks.items() if k[0] == epoch and k[1] >= first - 1}
        for key in wanted:
            if key not in blocks:
                ahead = _BLOCKS_AHEAD if (epoch, key[1] - 1) in blocks else 1
                start, stop = key[1] * _BLOCK, min((key[1] + ahead) * _BLOCK, self._n)
                rows = self._order(epoch)(np.arange(start, stop))
                for at in range(0, stop - start, _BLOCK):
                    blocks[epoch, key[1] + at // _BLOCK] = rows[at : at + _BLOCK]

        found = np.concatenate([blocks[key] for key in wanted])[positions - first * _BLOCK]
        blocks.pop((epoch, first - 1), None)
        self._blocks = blocks
        return found

    def _order(self, epoch: int) -> Permutation:
        known = self._permutation  # another thread may set it to another epoch's
        if known is None or known[0] != epoch:
            known = self._permutation = epoch, Permutation(self._n, self._seed, epoch)
        return known[1]


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014): every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
