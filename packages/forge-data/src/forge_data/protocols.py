"""What sources, streams and tokenizers of yours offer to forge_data; there is nothing to subclass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

__all__ = ["Source", "Stream", "Tokenizer"]


class Source(Protocol):
    """A stream of token ids cut into documents.

    `documents` holds the sorted int64 start offset of each document, the first 0; `tokenizer` is a
    spec for `load_tokenizer`, `vocab_size` and `tokenizer` are None where nobody recorded them.
    """

    vocab_size: int | None
    tokenizer: dict[str, Any] | None

    @property
    def num_tokens(self) -> int:
        """Of all documents."""
        ...

    @property
    def num_documents(self) -> int:
        """At least 1."""
        ...

    @property
    def documents(self) -> np.ndarray:
        """Start offsets (num_documents,) int64."""
        ...

    @property
    def max_token_id(self) -> int:
        """Above no id that `read` returns."""
        ...

    def read(self, start: int, stop: int) -> np.ndarray:
        """Ids of tokens start..stop-1, read-only, in the source's own integer type."""
        ...

    def fingerprint(self) -> dict[str, str | int]:
        """What identifies the tokens, as JSON; `documents` is the digest of the document offsets."""
        ...


class Stream(Protocol):
    """Rows by instance id; what a `Loader` reads.

    `arrays(ids)` gives arrays or tensors with as many rows as ids: tokens, labels, positions,
    document_ids; where it has them weights and source; and by any other name, as a tensor or Ragged, what
    a model takes besides (see Batch). Without ids it gives the same without rows, and reads nothing.
    `len` is the number of instances of an epoch, which an evaluation asks for.
    """

    def __len__(self) -> int:
        """Instances of an epoch."""
        ...

    def arrays(self, instance_ids: np.ndarray) -> Mapping[str, Any]:
        """Rows of these instances, a function of the ids and of what `fingerprint` tells."""
        ...

    def fingerprint(self) -> dict[str, str | int]:
        """What identifies the rows, as JSON; a resumed run with another one is refused."""
        ...


class Tokenizer(Protocol):
    """Text to ids and back.

    `eos_id` is None where there is no end-of-document token; 0 is a legal id, so test with `is None`.
    `splittable` says that encoding a text piece by piece gives the same ids as encoding it whole.
    """

    vocab_size: int
    eos_id: int | None
    fingerprint: str
    splittable: bool

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without an end of document."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; bytes that are no UTF-8 are replaced."""
        ...

    def spec(self) -> dict[str, Any]:
        """Plain data from which `load_tokenizer` makes it again."""
        ...
