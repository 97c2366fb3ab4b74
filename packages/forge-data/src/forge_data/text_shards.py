"""Rows of text that is read from front to back: V shards, each with its own reader, windows and packer.

V   virtual shards        P   pieces of the set, such as row groups        N   sample indices of a call
S   tokens in a row
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from forge_data._shared.problems import invalid
from forge_data._shared.sharded_rows import PLACES, ShardedRows
from forge_data.config import MAX_SEQ_LEN
from forge_data.errors import InvalidData, invalid_data
from forge_data.mixed_stream import seed_of
from forge_data.order import ORDER_VERSION, Permutation
from forge_data.packing import ARRAYS, POLICY, PackedStream, check_tokens_at_once
from forge_data.protocols import Tokenizer
from forge_data.sources.builtin import TokensInMemory
from forge_data.tokenizer import begin_key, document_ids

__all__ = ["Pieces", "TextShards"]

_VERSION = 1  # part of every fingerprint: raise it when a row would change


class Pieces(Protocol):
    """A set of texts in pieces that can be read one by one, each from front to back."""

    def __len__(self) -> int:
        """Number of pieces, P."""
        ...

    def texts(self, piece: int, start: int) -> Iterator[str]:
        """The texts of a piece from number `start` on; InvalidData for what is damaged or no text."""
        ...

    def fingerprint(self) -> dict[str, str | int]:
        """What identifies the texts, as JSON."""
        ...


class TextShards(ShardedRows):
    """The endless stream of rows of a set without an index: sample index i is row `i // V` of shard `i % V`.

    As `ShardedRows`, of documents: the `shuffle_window` documents of a window are shuffled and packed into rows by
    themselves; the last row of a window is padded. A row costs the tokens of the windows up to it, and each shard that
    this process reads holds one window of tokens in memory.
    Raises ValueError for numbers out of range.
    Usage: `TextShards(pieces, ByteTokenizer(), 256).arrays(np.arange(8))`.
    """

    def __init__(
        self,
        pieces: Pieces,
        tokenizer: Tokenizer,
        seq_len: int,
        seed: int = 0,
        *,
        virtual_shards: int = 256,
        shuffle_window: int = 256,
    ) -> None:
        bounds = {
            "seq_len": (seq_len, MAX_SEQ_LEN),
            "virtual_shards": (virtual_shards, 1 << 20),
            "shuffle_window": (shuffle_window, 1 << 30),
        }
        for name, (value, most) in bounds.items():
            if not 1 <= value <= most:
                rule = f"must be at least 1 and at most {most}"
                raise invalid(name, "range", value, rule, "use 256")

        self.pieces, self.tokenizer = pieces, tokenizer
        self.seq_len, self.seed = seq_len, seed
        self.source_lines = [
            f"{len(pieces)} pieces, whose documents and tokens are not counted, as they are read while the run trains"
        ]
        super().__init__(len(pieces), virtual_shards, shuffle_window)

    def arrays(self, instance_ids: np.ndarray) -> dict[str, np.ndarray]:
        """int64 arrays (N, S) as of PackedStream, `source` (N,), 0, and the place of each row's window (N, 3)."""
        shape = (len(instance_ids), self.seq_len)
        check_tokens_at_once(*shape)
        rows, places = self.read_rows(instance_ids, PackedStream.instance)
        out = {n: np.array([row[n] for row in rows], np.int64).reshape(shape) for n in ARRAYS}
        return {**out, "source": np.zeros(shape[0], np.int64), PLACES: places}

    def fingerprint(self) -> dict[str, str | int]:
        """Everything that determines the rows, as flat JSON; a resume compares it."""
        return {
            **{f"source.{key}": value for key, value in self.pieces.fingerprint().items()},
            "source.tokenizer": self.tokenizer.fingerprint,
            "source.eos": -1 if self.tokenizer.eos_id is None else self.tokenizer.eos_id,
            **{f"source.{key}": str(value) for key, value in begin_key(self.tokenizer).items()},
            "packing.policy": POLICY,
            "packing.seq_len": self.seq_len,
            "stream.version": _VERSION,
            "stream.pieces": len(self.pieces),
            "stream.virtual_shards": self.num_shards,
            "stream.shuffle_window": self.shuffle_window,
            "order.version": ORDER_VERSION,
            "order.seed": self.seed,
        }

    def _order(self, name: str, count: int, epoch: int) -> np.ndarray:
        return Permutation(count, seed_of(self.seed, name), epoch)(np.arange(count))

    def _items(self, piece: int, start: int) -> Iterator[tuple[int, str]]:
        return enumerate(self.pieces.texts(piece, start), start)

    def _pack(self, shard: int, place: int, items: Sequence[str]) -> Sequence[Any] | PackedStream:
        """Rows of the documents in another order; none of documents of white space alone."""
        texts = [items[i] for i in self._order(f"window {shard}", len(items), place)]
        encoded = [self.tokenizer.encode(text) for text in texts if text.strip()]
        documents = [document_ids(self.tokenizer, ids, np.uint32) for ids in encoded]
        documents = [ids for ids in documents if len(ids)]
        return (
            PackedStream(TokensInMemory(documents), self.seq_len, shuffle=False)
            if documents
            else ()
        )

    def _no_rows(self, shard: int, pieces: Sequence[int]) -> InvalidData:
        rule = f"of {self.num_shards} must hold text, but pieces {pieces!s:.80} have none"
        fix = "remove empty files, or use fewer virtual_shards"
        return invalid_data("shard", "empty", shard, rule, fix)
