"""Rows of text that is read from front to back: V shards, each with its own reader, windows and packer.

V   virtual shards        P   pieces of the set, such as row groups        N   instances of a call
S   tokens in a row
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import islice
from typing import Any, Protocol

import numpy as np

from forge_data._shared.problems import invalid
from forge_data.config import MAX_SEQ_LEN
from forge_data.errors import invalid_data
from forge_data.mixed_stream import seed_of
from forge_data.order import ORDER_VERSION, Permutation
from forge_data.packing import ARRAYS, POLICY, PackedStream, check_tokens_at_once
from forge_data.places import PLACES
from forge_data.protocols import Tokenizer
from forge_data.tokenizer import begin_key, document_ids

__all__ = ["Pieces", "TextShards"]

_VERSION = 1  # part of every fingerprint: raise it when a row would change
_DOCUMENT_BITS = 32  # of a place: turn << 32 | document, so that it rises while the shard is read


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


class TextShards:
    """The endless stream of rows of a set without an index: instance i is row `i // V` of shard `i % V`.

    The P pieces are dealt out to V = min(virtual_shards, P) shards by the seed. A shard reads its pieces in another
    order in each of its epochs, takes `shuffle_window` documents at a time, shuffles them and packs them into rows by
    themselves; the last row of a window is padded. When its pieces end, its next epoch begins: an epoch is one of a
    shard, in which every document of it comes once. `len` raises TypeError: the rows are not known before they are read.

    A row costs nothing within the window that was read last, and forward the windows up to it, tokenized; `load_places`
    says where to begin. Each shard that this process reads holds one window of tokens in memory.
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
        self.seq_len, self.seed, self.shuffle_window = seq_len, seed, shuffle_window
        self.num_shards = min(virtual_shards, len(pieces))
        self.source_lines = [
            f"{len(pieces)} pieces, whose documents and tokens are not counted, as they are read while the run trains"
        ]
        self._order = Permutation(len(pieces), seed_of(seed, "pieces"), 0)
        self._lock = threading.Lock()  # a thread that read ahead may still read when another begins
        self.load_places(np.zeros((self.num_shards, 2), np.int64))

    def __len__(self) -> int:
        raise TypeError(
            "TextShards.__len__ is not known, as a stream's rows are known when they are read; give a number of instances, "
            "or tokenize the set"
        )

    def shards_of(self, instance_ids: np.ndarray) -> np.ndarray:
        """The shard (N,) of each instance."""
        shards: np.ndarray = np.asarray(instance_ids, np.int64) % self.num_shards
        return shards

    def load_places(self, table: np.ndarray) -> None:
        """Begin each shard at its place (V, 2), as `Places` collected them; rows before are read from the start."""
        with self._lock:
            self._table = np.array(table, np.int64)
            self._shards: dict[int, _Shard] = {}

    def arrays(self, instance_ids: np.ndarray) -> dict[str, np.ndarray]:
        """int64 arrays (N, S) as of PackedStream, `source` (N,), 0, and the place of each row's window (N, 3)."""
        ids = np.asarray(instance_ids, np.int64)
        check_tokens_at_once(len(ids), self.seq_len)
        out = {name: np.empty((len(ids), self.seq_len), np.int64) for name in ARRAYS}
        places = np.empty((len(ids), 3), np.int64)
        with self._lock:
            for i in np.argsort(ids, kind="stable"):
                row, shard = divmod(int(ids[i]), self.num_shards)
                window = self._window(shard, row)
                found = window.rows.arrays(np.array([row - window.first]))
                for name in ARRAYS:
                    out[name][i] = found[name][0]
                places[i] = shard, window.first, window.place
        return {**out, "source": np.zeros(len(ids), np.int64), PLACES: places}

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

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_lock": None, "_shards": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def _window(self, shard: int, row: int) -> _Window:
        """The window of a shard that has a row."""
        if shard not in self._shards or row < self._shards[shard].window.first:
            first, place = map(int, self._table[shard])
            if row < first:  # before what was loaded
                first = place = 0
            self._shards[shard] = _Shard(self._windows(shard, first, place))
        try:
            return self._shards[shard].window_of(row)
        except BaseException:
            del self._shards[shard]  # its generator has ended; another begins at the same place
            raise

    def _windows(self, shard: int, first: int, place: int) -> Iterator[_Window]:
        """The windows of a shard, from the one on that begins at `place` and has row `first`; without end."""
        pieces = self._order(np.arange(shard, len(self.pieces), self.num_shards))
        turn, document = place >> _DOCUMENT_BITS, place & ((1 << _DOCUMENT_BITS) - 1)
        while True:  # an epoch of the shard, or the rest of one
            whole, before = turn % len(pieces) == 0 and document == 0, first
            documents = self._documents(shard, pieces, turn, document)
            while batch := list(islice(documents, self.shuffle_window)):
                window = self._pack(shard, first, batch)
                if window is not None:
                    yield window
                    first += len(window.rows)
            if whole and first == before:
                rule = f"of {self.num_shards} must hold text, but pieces {pieces.tolist()!s:.80} have none"
                fix = "remove empty files, or use fewer virtual_shards"
                raise invalid_data("shard", "empty", shard, rule, fix)
            turn, document = (turn // len(pieces) + 1) * len(pieces), 0

    def _documents(
        self, shard: int, pieces: np.ndarray, turn: int, document: int
    ) -> Iterator[tuple[int, str]]:
        """(place, text) from a place to the end of its epoch; `turn` counts the pieces of the shard over all epochs."""
        epoch = turn // len(pieces)
        shuffle = Permutation(len(pieces), seed_of(self.seed, f"shard {shard}"), epoch)
        order = shuffle(np.arange(len(pieces)))
        for k in range(turn, (epoch + 1) * len(pieces)):
            texts = self.pieces.texts(int(pieces[order[k % len(pieces)]]), document)
            for number, text in enumerate(texts, start=document):
                yield k << _DOCUMENT_BITS | number, text
            document = 0

    def _pack(self, shard: int, first: int, batch: list[tuple[int, str]]) -> _Window | None:
        """The rows of some documents, shuffled; None for documents of white space alone."""
        place = batch[0][0]
        shuffle = Permutation(len(batch), seed_of(self.seed, f"window {shard}"), place)
        documents = []
        for i in shuffle(np.arange(len(batch))):
            text = batch[i][1]
            if text.strip():
                ids = self.tokenizer.encode(text)
                documents.append(document_ids(self.tokenizer, ids, np.uint32))
        documents = [ids for ids in documents if len(ids)]
        if not documents:
            return None
        return _Window(first, place, PackedStream(_Tokens(documents), self.seq_len, shuffle=False))


class _Window:
    """Rows that were packed together: the first one's number in the shard, and where their documents begin."""

    def __init__(self, first: int, place: int, rows: PackedStream) -> None:
        self.first, self.place, self.rows = first, place, rows


class _Shard:
    """The last window that was read of a shard, and the windows after it."""

    def __init__(self, windows: Iterator[_Window]) -> None:
        self._windows = windows
        self.window = next(windows)

    def window_of(self, row: int) -> _Window:
        while row >= self.window.first + len(self.window.rows):
            self.window = next(self._windows)
        return self.window


class _Tokens:
    """Documents in memory, as a `Source` of packing."""

    vocab_size: int | None = None
    tokenizer: dict[str, Any] | None = None

    def __init__(self, documents: list[np.ndarray]) -> None:
        self._tokens = np.concatenate(documents)
        lengths = [len(ids) for ids in documents]
        self.documents = np.cumsum([0, *lengths[:-1]], dtype=np.int64)
        self.num_documents = len(lengths)
        self.num_tokens = len(self._tokens)

    @property
    def max_token_id(self) -> int:
        return int(self._tokens.max())

    def read(self, start: int, stop: int) -> np.ndarray:
        return self._tokens[start:stop]

    def fingerprint(self) -> dict[str, str | int]:
        return {}
