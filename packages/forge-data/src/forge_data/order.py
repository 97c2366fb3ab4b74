"""The order of an epoch: a keyed permutation of [0, n) that is computed, never stored.

A balanced Feistel network over 2k bits, the smallest even width that holds n, is a bijection of
[0, 4^k); walking its cycle until the value is under n makes it one of [0, n). Every operation is on
uint64, so the order is the same on every machine, and a seek costs the same at 10^12 as at 10.

    N   number of positions in a call

Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (CT-RSA 2002), section 4.
"""

from __future__ import annotations

import hashlib

import numpy as np

from forge_data._shared.problems import invalid

__all__ = ["ORDER_VERSION", "Permutation", "epochs_of"]

ORDER_VERSION = 1  # part of every fingerprint: raise it whenever an order would change
_ROUNDS = 12
_MAX_N = 1 << 62


def epochs_of(instance_ids: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """(epoch, place in it), both (N,) int64, of instances (N,) with n an epoch. ValueError for one below 0."""
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


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014): every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
