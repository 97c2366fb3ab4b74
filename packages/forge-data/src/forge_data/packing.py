"""Concatenate and split: all documents in a line, cut into rows of equal length.

Nothing is stored: row r is tokens r*S .. r*S+S-1 of the source, its labels the same plus one, and
the documents in it are found by bisection in the source's mapped offsets.

    N   instances of a batch        S   tokens in a row
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from forge_data.batch import IGNORE, PAD_DOCUMENT, Batch
from forge_data.config import MAX_SEQ_LEN, MAX_TOKENS_AT_ONCE
from forge_data.order import ORDER_VERSION, Permutation

if TYPE_CHECKING:
    from forge_data.protocols import Source

POLICY = "concatenate_and_split-1"  # part of every fingerprint: raise it when a row would change
ARRAYS = ("tokens", "labels", "positions", "document_ids")
_FIELDS = (*ARRAYS, "weights", "source")  # of a Batch that a stream may give; the rest are extras


class PackedStream:
    """The endless stream of instances of one source: `len(stream)` rows an epoch, each exactly once.

    Instance i is row `permutation(seed, i // n)(i % n)` of the packed source; without `shuffle` row
    `i % n`. Every token is an input once per epoch: long documents go on in the next row, the last
    row is padded. A row costs one read of S+1 tokens and two bisections; any i costs the same.
    Raises ValueError for a bad `seq_len`. Usage: `PackedStream(source, 256, seed=0).instance(0)`.
    """

    def __init__(self, source: Source, seq_len: int, seed: int = 0, shuffle: bool = True) -> None:
        if not 1 <= seq_len <= MAX_SEQ_LEN:
            raise ValueError(
                f"seq_len {seq_len!r:.40} must be at least 1 and at most {MAX_SEQ_LEN}; use 256"
            )
        self.source = source
        self.seq_len = seq_len
        self.seed = seed
        self.shuffle = shuffle
        self._n = -(-source.num_tokens // seq_len)
        self._permutation: tuple[int, Permutation] | None = None  # of the epoch last asked for

    def __len__(self) -> int:
        """Instances per epoch."""
        return self._n

    def rows(self, instance_ids: np.ndarray) -> np.ndarray:
        """Rows of the packed source (N,) that the instances (N,) are."""
        ids = np.asarray(instance_ids, dtype=np.int64)
        if ids.size and ids.min() < 0:
            raise ValueError(f"instance {ids.min()} must be at least 0; count from 0")
        epochs, within = np.divmod(ids, self._n)
        if not self.shuffle:
            return within
        rows = np.empty_like(within)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            rows[chosen] = self._order(int(epoch))(within[chosen])
        return rows

    def instance(self, i: int) -> dict[str, np.ndarray]:
        """Instance i as int64 arrays (S,): tokens, labels, positions, document_ids."""
        out = {name: np.empty((1, self.seq_len), np.int64) for name in ARRAYS}
        self._fill(int(self.rows(np.array([i]))[0]), {name: a[0] for name, a in out.items()})
        return {name: a[0] for name, a in out.items()}

    def arrays(self, instance_ids: np.ndarray) -> dict[str, np.ndarray]:
        """The same for many instances: int64 arrays (N, S), and `source` (N,), 0."""
        shape = (len(instance_ids), self.seq_len)
        if shape[0] * shape[1] > MAX_TOKENS_AT_ONCE:
            raise ValueError(
                f"{shape[0]} rows of seq_len {shape[1]} must be at most {MAX_TOKENS_AT_ONCE} tokens "
                "at once; use a smaller global_batch or more ranks"
            )
        out = {name: np.empty(shape, np.int64) for name in ARRAYS}
        for i, row in enumerate(self.rows(instance_ids)):
            self._fill(int(row), {name: a[i] for name, a in out.items()})
        return {**out, "source": np.zeros(len(instance_ids), np.int64)}

    def batch(self, instance_ids: Iterable[int]) -> Batch:
        """A batch of the given instances, on the host, for evaluation or a loop of your own."""
        return batch_of(self, instance_ids)

    def fingerprint(self) -> dict[str, str | int]:
        """What the stream is a function of, flat and as JSON; a resume compares it."""
        source = self.source.fingerprint()
        plan = json.dumps([source.get("documents", source), self.seq_len, POLICY], sort_keys=True)
        return {
            **{f"source.{key}": value for key, value in source.items()},
            "packing.policy": POLICY,
            "packing.seq_len": self.seq_len,
            "packing.plan": hashlib.sha256(plan.encode()).hexdigest()[:16],
            "order.version": ORDER_VERSION,
            "order.seed": self.seed,
            "order.shuffle": int(self.shuffle),
        }

    def _order(self, epoch: int) -> Permutation:
        if self._permutation is None or self._permutation[0] != epoch:
            self._permutation = epoch, Permutation(self._n, self.seed, epoch)
        return self._permutation[1]

    def _fill(self, row: int, out: Mapping[str, np.ndarray]) -> None:
        """Write row `row` into arrays (S,)."""
        start = row * self.seq_len
        ids = self.source.read(start, min(start + self.seq_len + 1, self.source.num_tokens))
        inputs, followed = min(len(ids), self.seq_len), len(ids) - 1  # tokens; those with a next
        documents = self.source.documents
        first = int(np.searchsorted(documents, start, side="right"))
        last = int(np.searchsorted(documents, start + len(ids), side="left"))
        begins = np.asarray(documents[first:last]) - start  # (documents that begin,) in 1..S

        tokens, labels = out["tokens"], out["labels"]  # (S,)
        tokens[:inputs], tokens[inputs:] = ids[:inputs], 0
        labels[:followed], labels[followed:] = ids[1:], IGNORE
        labels[begins - 1] = IGNORE  # the end of one document does not predict the next

        begins = begins[begins < inputs]
        starts = np.concatenate([np.zeros(1, np.int64), begins])
        lengths = np.diff(starts, append=inputs)
        out["document_ids"][:inputs] = np.repeat(np.arange(len(starts)), lengths)
        out["document_ids"][inputs:] = PAD_DOCUMENT
        out["positions"][:inputs] = np.arange(inputs) - np.repeat(starts, lengths)
        out["positions"][inputs:] = 0


def digest_of_ids(instance_ids: np.ndarray) -> str:
    """64 bits of sha256 over the ids as little-endian int64, as 16 hex digits."""
    return hashlib.sha256(np.asarray(instance_ids).astype("<i8").tobytes()).hexdigest()[:16]


def batch_of(stream: Any, instance_ids: Iterable[int]) -> Batch:
    """A host batch of some instances of any stream, under their own digest."""
    ids = np.fromiter(instance_ids, dtype=np.int64)
    return make_batch(stream.arrays(ids), ids, digest_of_ids(ids))


def make_batch(arrays: Mapping[str, Any], ids: np.ndarray, digest: str) -> Batch:
    """A host Batch that shares the memory of a stream's arrays: those that Batch names, and extras."""
    tensors = as_tensors(arrays)
    known = {name: tensors.pop(name) for name in _FIELDS if name in tensors}
    return Batch(**known, extras=tensors, instance_ids=torch.from_numpy(ids), digest=digest)


def as_tensors(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays as tensors in the same memory; tensors and Ragged as they are."""
    return {
        name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        for name, value in arrays.items()
    }
