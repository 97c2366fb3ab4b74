"""English text of every Python installation: the topics of its manual, about 465 kB."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from forge_data.errors import invalid_data
from forge_data.tokenizer import ByteTokenizer
from forge_data.tokens.format import check_range, check_split

_EVERY = 16  # one topic of this many is held out, so that most of a small text is trained


class TokensInMemory:
    """Documents (n,) of ids in memory, read-only, as a `Source`."""

    vocab_size: int | None = None
    tokenizer: dict[str, Any] | None = None

    def __init__(self, documents: Sequence[np.ndarray]) -> None:
        lengths = [len(ids) for ids in documents]
        self._tokens = np.concatenate(documents)  # (num_tokens,)
        self.documents = np.cumsum([0, *lengths[:-1]], dtype=np.int64)
        self.num_tokens, self.num_documents = len(self._tokens), len(lengths)
        for array in (self._tokens, self.documents):
            array.flags.writeable = False

    @property
    def max_token_id(self) -> int:
        """The largest id that occurs."""
        return int(self._tokens.max())

    def read(self, start: int, stop: int) -> np.ndarray:
        """Ids of tokens start..stop-1, a read-only view."""
        check_range(start, stop, self.num_tokens)
        return self._tokens[start:stop]

    def fingerprint(self) -> dict[str, str | int]:
        """Nothing: what is in memory has no name."""
        return {}


class BuiltinCorpus(TokensInMemory):
    """`pydoc_data.topics` as bytes: a document per topic in sorted order, each ended by EOS.

    Every 16th topic is in the validation split. Topics differ in length by a factor of a hundred, so
    the first of these topics, one of the first 16, is the one that holds out nearest to 1/16 of the bytes.
    Text and fingerprint differ a little between Python versions. Costs a few milliseconds and one MB.
    Usage: `BuiltinCorpus("train").read(0, 100)`.
    """

    def __init__(self, split: str = "train") -> None:
        check_split(split)
        tokenizer = ByteTokenizer()
        self.split = split
        self.vocab_size, self.tokenizer = tokenizer.vocab_size, tokenizer.spec()
        end = np.array([tokenizer.eos_id], np.uint16)
        texts = [np.frombuffer(text, np.uint8) for text in _texts_of(split)]
        super().__init__([np.concatenate([text, end]) for text in texts])

    def fingerprint(self) -> dict[str, str | int]:
        """Digests of the tokens and of the document offsets."""
        return {
            "kind": "builtin",
            "split": self.split,
            "num_tokens": self.num_tokens,
            "tokens": hashlib.sha256(self._tokens.astype("<u2").tobytes()).hexdigest(),
            "documents": hashlib.sha256(self.documents.astype("<i8").tobytes()).hexdigest(),
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return BuiltinCorpus, (self.split,)  # a worker reads the text from its own Python


def _texts_of(split: str) -> list[bytes]:
    texts = _texts()
    held_out = set(range(_first_held_out([len(text) for text in texts]), len(texts), _EVERY))
    return [text for i, text in enumerate(texts) if (i in held_out) == (split == "validation")]


def _texts() -> list[bytes]:
    """All topics, in sorted order."""
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        rule = "must be in this Python, as it is in the standard library"
        fix = 'install all of it, or prepare files and use name = "tokens"'
        raise invalid_data("pydoc_data.topics", "missing", ..., rule, fix) from None
    return [topics[name].encode("utf-8") for name in sorted(topics)]


def _first_held_out(lengths: list[int]) -> int:
    """The topic among the first 16 that holds out nearest to 1/16 of the bytes, with every 16th after it."""
    target = sum(lengths) / _EVERY
    return min(range(_EVERY), key=lambda first: abs(sum(lengths[first::_EVERY]) - target))
