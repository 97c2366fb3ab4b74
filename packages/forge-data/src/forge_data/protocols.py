"""Methods and attributes of sources, streams and tokenizers; there is nothing to subclass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

__all__ = ["ShardedStream", "Source", "Stream", "Tokenizer"]


class Source(Protocol):
    """Token ids in one sequence, divided into documents.

    `documents` holds the sorted int64 start offset of each document, the first 0; `tokenizer` is a
    spec for `load_tokenizer`; `vocab_size` and `tokenizer` are None if they were not recorded.

    Workers get a source by a fork, or pickled where the system has no fork, so it must be picklable; keep maps of files out
    of the pickle.
    A thread may call `read` while the training process does. A source may also have `summary()`, a line for the start of a
    run, and `ends`, words on the tokens that begin and end its documents.
    """

    vocab_size: int | None
    tokenizer: dict[str, Any] | None

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all documents."""
        ...

    @property
    def num_documents(self) -> int:
        """Number of documents, at least 1."""
        ...

    @property
    def documents(self) -> np.ndarray:
        """Start offsets (num_documents,) int64."""
        ...

    @property
    def max_token_id(self) -> int:
        """An upper bound of the ids that `read` returns."""
        ...

    def read(self, start: int, stop: int) -> np.ndarray:
        """Ids of tokens start..stop-1, read-only, in the source's own integer type."""
        ...

    def fingerprint(self) -> dict[str, str | int]:
        """Digests that identify the tokens, as JSON; `documents` is the digest of the document offsets."""
        ...


class Stream(Protocol):
    """Rows by instance id, the input of a `Loader`.

    `arrays(ids)` returns arrays or tensors with one row for each id: tokens, labels, positions,
    document_ids; optionally weights and source; and further inputs of a model by any other name, as
    tensors or Ragged (see Batch), or an object with `values` and `row_offsets` like it. For no ids it returns the same
    names with zero rows, and reads nothing.
    `len` is the number of instances of an epoch; evaluations use it.
    """

    def __len__(self) -> int:
        """Instances of an epoch."""
        ...

    def arrays(self, instance_ids: np.ndarray) -> Mapping[str, Any]:
        """Rows of these instances, determined by the ids and the content of `fingerprint`."""
        ...

    def fingerprint(self) -> dict[str, str | int]:
        """Everything that determines the rows, as JSON; a resume with another fingerprint raises an error."""
        ...


class ShardedStream(Stream, Protocol):
    """A stream whose rows are found by reading shards from front to back; a `Loader` keeps their places.

    `arrays` also gives `shard_places`, int64 (N, 3): for each row its shard (-1: none), and two numbers that rise
    with the rows of that shard and say where to begin reading for the rows after it.
    """

    num_shards: int

    def shards_of(self, instance_ids: np.ndarray) -> np.ndarray:
        """The shard of each instance, -1 for none; a worker reads all rows of its shards."""
        ...

    def load_places(self, table: np.ndarray) -> None:
        """Begin each shard at the two numbers (num_shards, 2) that were given last; 0, 0 is its start."""
        ...


class Tokenizer(Protocol):
    """Text to ids and back.

    `eos_id` is None where there is no end-of-document token; 0 is a legal id, so test with `is None`. `end_ids` are
    those that end a text which a model writes, `eos_id` among them.
    A tokenizer may also have `begin_ids`, a tuple of the ids that begin a text; one without it has none.
    `splittable` is True if encoding a text piece by piece gives the same ids as encoding it whole.
    """

    vocab_size: int
    eos_id: int | None
    end_ids: tuple[int, ...]
    fingerprint: str
    splittable: bool

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without an end-of-document token."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; bytes that are not UTF-8 are replaced."""
        ...

    def spec(self) -> dict[str, Any]:
        """Plain data from which `load_tokenizer` builds this tokenizer."""
        ...
