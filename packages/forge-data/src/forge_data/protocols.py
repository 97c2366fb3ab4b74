"""Methods and attributes of sources, streams and tokenizers; there is nothing to subclass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

__all__ = ["Source", "Stream", "Tokenizer"]


class Source(Protocol):
    """Token ids in one sequence, divided into documents.

    `documents` holds the sorted int64 start offset of each document, the first 0; `tokenizer` is a
    spec for `load_tokenizer`; `vocab_size` and `tokenizer` are None if they were not recorded.
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
    tensors or Ragged (see Batch). For no ids it returns the same names with zero rows, and reads nothing.
    `len` is the number of instances of an epoch; evaluations use it.
    """

    def __len__(self) -> int:
        """Instances of an epoch."""
        ...

    def arrays(self, instance_ids: np.ndarray) -> Mapping[str, Any]:
        """Rows of these instances, determined by the ids and the content of `fingerprint`."""
        ...

    def fingerprint(self) -> dict[str, str | int]:
        """Everything that determines the rows, as JSON; a resume with another fingerprint is refused."""
        ...


class Tokenizer(Protocol):
    """Text to ids and back.

    `eos_id` is None where there is no end-of-document token; 0 is a legal id, so test with `is None`.
    `splittable` is True if encoding a text piece by piece gives the same ids as encoding it whole.
    """

    vocab_size: int
    eos_id: int | None
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
