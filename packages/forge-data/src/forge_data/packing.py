"""Concatenate and split: all documents are concatenated and cut into rows of equal length.

Nothing is stored: row r is tokens r*S .. r*S+S-1 of the source, its labels the same plus one, and
its documents are found by bisection in the memory-mapped offsets of the source.

    N   instances of a call        S   tokens in a row
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import numpy as np

from forge_data.batch import IGNORE, PAD_DOCUMENT
from forge_data.config import MAX_SEQ_LEN, MAX_TOKENS_AT_ONCE
from forge_data.order import ORDER_VERSION, Permutation
from forge_data.protocols import Source

POLICY = "concatenate_and_split-1"  # part of every fingerprint: raise it when a row would change
ARRAYS = ("tokens", "labels", "positions", "document_ids")


class PackedStream:
    """The endless stream of instances of one source: `len(stream)` rows an epoch, each exactly once.

    Instance i is row `permutation(seed, i // n)(i % n)` of the packed source; without `shuffle` row
    `i % n`. Every token is an input once per epoch: long documents continue in the next row, the last
    row is padded. A row costs one read of S+1 tokens and two bisections, whatever i is.
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
        self._permutation: tuple[int, Permutation] | None = None  # of the epoch of the last call

    def __len__(self) -> int:
        """Instances per epoch."""
        return self._n

    def rows(self, instance_ids: np.ndarray) -> np.ndarray:
        """The rows (N,) of the packed source for instances (N,)."""
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

    def fingerprint(self) -> dict[str, str | int]:
        """Everything that determines the rows, as flat JSON; a resume compares it."""
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
        inputs, followed = min(len(ids), self.seq_len), len(ids) - 1  # tokens; tokens with a label
        # Only the documents that begin inside the row are read from the mapped offsets.
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
