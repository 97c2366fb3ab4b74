"""Text to ids and back: bytes, or any JSON of the `tokenizers` library.

A tokenizer is described by a *spec*, plain data that is stored in sidecars and checkpoints:
`{"name": "byte"}` or `{"name": "json", "path": ..., "eos": ..., "fingerprint": ...}`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forge_data._shared.paths import read_regular, user_path
from forge_data._shared.problems import invalid
from forge_data._shared.tokenizer_settings import switch_off_settings
from forge_data.errors import InvalidData
from forge_data.protocols import Tokenizer

_MAX_BYTES = 1 << 28  # of a tokenizer's JSON; the largest in use have tens of MB
EOS_NAMES = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>")


class ByteTokenizer:
    """Ids 0..255 are the bytes of UTF-8, 256 ends a document. Usage: `ByteTokenizer().encode("hi")`."""

    vocab_size = 257
    eos_id: int | None = 256
    fingerprint = "byte-1"
    splittable = True

    def encode(self, text: str) -> list[int]:
        """UTF-8 bytes of `text` as ids; no end-of-document token is added."""
        return list(text.encode("utf-8"))

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of `encode` for each text, as uint8."""
        return [np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; broken UTF-8 becomes U+FFFD, end-of-document is dropped. ValueError over 256."""
        if len(ids) and not 0 <= min(ids) <= max(ids) <= 256:
            worst = max(ids) if max(ids) > 256 else min(ids)
            rule = "must be an id of the byte tokenizer, 0..256"
            fix = "decode with the tokenizer the ids were made with"
            raise invalid("ids", "range", worst, rule, fix)
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def spec(self) -> dict[str, Any]:
        """Plain data from which `load_tokenizer` makes this tokenizer again."""
        return {"name": "byte", "fingerprint": self.fingerprint}


class JsonTokenizer:
    """A JSON file of the `tokenizers` library (extra `tokenizers`, imported here and not before).

    `eos` is the end-of-document token; without it the first of the usual names that is in the vocabulary
    (`<|endoftext|>`, `</s>`, `<eos>`, `<|end_of_text|>`), and `eos_id` is None if none is. Raises InvalidData for a missing or broken file and ValueError for an unknown
    `eos`. Usage: `JsonTokenizer("tokenizer.json").encode("hi")`.
    """

    splittable = False

    def __init__(self, path: str | Path, eos: str | None = None) -> None:
        self.path = user_path(path)
        where = str(self.path)
        if not self.path.is_file():
            fix = 'check the path or use "byte"'
            raise invalid(
                "tokenizer", "not_found", where, "must be a JSON file", fix, kind=InvalidData
            )
        try:
            from tokenizers import Tokenizer as Library
        except ImportError:
            rule, fix = "needs the tokenizers library", "pip install 'forge-data[tokenizers]'"
            raise invalid("tokenizer", "requires", where, rule, fix) from None
        content = read_regular(self.path, _MAX_BYTES, InvalidData)
        try:
            self._tokenizer = Library.from_str(content.decode("utf-8"))
        except Exception as error:  # the library raises bare Exception
            rule = f"must be a JSON file of the tokenizers library ({error})"
            fix = "save one with Tokenizer.save(path)"
            raise invalid("tokenizer", "damaged", where, rule, fix, kind=InvalidData) from None
        switch_off_settings(self._tokenizer)
        vocabulary = self.vocabulary()
        self.vocab_size = max(vocabulary.values(), default=-1) + 1  # ids may have holes
        self.fingerprint = hashlib.sha256(content).hexdigest()
        self.eos = eos if eos is not None else next((n for n in EOS_NAMES if n in vocabulary), None)
        if eos is not None and eos not in vocabulary:
            rule = f"must be in the vocabulary of {self.path}"
            fix = "name one that is, or leave it out to try the usual names"
            raise invalid("eos", "unknown", eos, rule, fix)
        self.eos_id: int | None = None if self.eos is None else vocabulary[self.eos]

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without the special tokens that a template would add."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of `encode` for each text, in the threads of the library (TOKENIZERS_PARALLELISM)."""
        found = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in found]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens such as end-of-document."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def vocabulary(self) -> dict[str, int]:
        """Ids of all tokens, added ones included, in the letters of the file."""
        found: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        return found

    def content(self) -> dict[str, Any]:
        """The tables of the file, as the library writes them."""
        found: dict[str, Any] = json.loads(self._tokenizer.to_str())
        return found

    def spec(self) -> dict[str, Any]:
        """Plain data from which `load_tokenizer` makes this tokenizer again."""
        return {
            "name": "json",
            "path": str(self.path),
            "eos": self.eos,
            "fingerprint": self.fingerprint,
        }


def load_tokenizer(spec: Mapping[str, Any] | str) -> Tokenizer:
    """The tokenizer of a spec, of `"byte"`, or of the path of a JSON file.

    Raises ValueError for an unknown name, InvalidData if the file has another fingerprint than the
    spec. Usage: `load_tokenizer(source.tokenizer).decode(ids)`.
    """
    if isinstance(spec, str):
        spec = {"name": "byte"} if spec == "byte" else {"name": "json", "path": spec}
    name = spec.get("name")
    tokenizer: Tokenizer
    if name == "byte":
        tokenizer = ByteTokenizer()
    elif name == "json" and spec.get("path"):
        tokenizer = JsonTokenizer(spec["path"], spec.get("eos"))
    else:
        rule = 'must have the name "byte", or "json" and a path'
        raise invalid("tokenizer", "unknown", dict(spec), rule, "use the spec of a source")
    expected = spec.get("fingerprint", tokenizer.fingerprint)
    if expected != tokenizer.fingerprint:
        rule = f"has fingerprint {tokenizer.fingerprint[:16]}, but the tokens were made with {str(expected)[:16]}"
        fix = "put the original file back or prepare the text again"
        raise invalid("tokenizer", "mismatch", spec.get("path", name), rule, fix, kind=InvalidData)
    return tokenizer
