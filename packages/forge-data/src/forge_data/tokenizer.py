"""Text to ids and back: bytes, or any JSON of the `tokenizers` library.

A tokenizer is described by a *spec*, plain data that is stored in sidecars and checkpoints:
`{"name": "byte"}` or `{"name": "json", "path": ..., "eos": ..., "bos": [...], "ends": [...], "fingerprint": ...}`, without
`bos` where no token begins a text, and without `ends` where no chat template ends answers by other tokens than `eos`. Data that was prepared before there was a `bos` has none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from forge_data._shared.paths import read_regular, user_path
from forge_data._shared.problems import invalid
from forge_data._shared.special_tokens import Found, begin_tokens, end_tokens
from forge_data._shared.tokenizer_settings import switch_off_settings
from forge_data.errors import InvalidData, invalid_data
from forge_data.protocols import Tokenizer

__all__ = [
    "NONE",
    "ByteTokenizer",
    "JsonTokenizer",
    "begin_key",
    "describe_ends",
    "document_ids",
    "document_tokenizer",
    "encode_prompt",
    "load_tokenizer",
    "prompt_ids",
]

_MAX_BYTES = 1 << 28  # of a tokenizer's JSON; the largest in use have tens of MB
#: Given as eos or bos: no token. Jobs write "", as "none" is their way to write that a key is not given.
NONE = ("", "none")


class ByteTokenizer:
    """Ids 0..255 are the bytes of UTF-8, 256 ends a document. Usage: `ByteTokenizer().encode("hi")`."""

    vocab_size = 257
    eos_id: int | None = 256
    begin_ids: tuple[int, ...] = ()
    end_ids: tuple[int, ...] = (256,)
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

    eos: the token that ends a document, or "" for none; by default that of the tokenizer's files, see `end_tokens`.
    bos: the token that begins one, or several, or "" for none; by default as the tokenizer's files say, see `begin_tokens`.
    ends: further tokens that end a text which a model writes, as those that a chat template puts after answers.

    `begin` and `end` hold them with the reason, `begin_ids` and `end_ids` their ids; `eos_id` is None unless there is one.
    A file `tokenizer.json` belongs to the tokenizer_config.json and special_tokens_map.json next to it. Raises InvalidData
    for a missing or broken file and ValueError for an unknown token. Usage: `JsonTokenizer("tokenizer.json").encode("hi")`.
    """

    splittable = False

    def __init__(
        self,
        path: str | Path,
        eos: str | None = None,
        bos: str | Sequence[str] | None = None,
        ends: Sequence[str] = (),
    ) -> None:
        self.path = user_path(path)
        where = str(self.path)
        if not self.path.is_file():
            fix = 'check the path or use "byte"'
            raise invalid_data("tokenizer", "not_found", where, "must be a JSON file", fix)

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
            raise invalid_data("tokenizer", "damaged", where, rule, fix) from None
        switch_off_settings(self._tokenizer)

        self.vocab_size = max(self.vocabulary().values(), default=-1) + 1  # ids may have holes
        self.fingerprint = hashlib.sha256(content).hexdigest()
        self.begin = self._chosen("bos", bos, begin_tokens)
        self.end = self._chosen("eos", eos, end_tokens)
        self.begin_ids = tuple(number for number, _ in self.begin.tokens)

        self.answers = self._chosen("ends", ends, end_tokens)
        ending = (*self.end.tokens, *self.answers.tokens)
        self.end_ids = tuple(dict.fromkeys(number for number, _ in ending))
        only = self.end.tokens[0] if len(self.end.tokens) == 1 else (None, None)
        self.eos_id: int | None = only[0]
        self.eos: str | None = only[1]

    def _chosen(
        self, key: str, given: str | Sequence[str] | None, rule: Callable[..., Found]
    ) -> Found:
        """The tokens that `given` names, or those of the tokenizer's files."""
        if given is None:
            folder = self.path.parent if self.path.name == "tokenizer.json" else None
            return rule(self._tokenizer, folder)
        names = [given] if isinstance(given, str) else given
        names = [] if given in NONE else names
        found: list[Any] = [(self._tokenizer.token_to_id(name), name) for name in names]
        for number, name in found:
            if number is None:
                must = f"must be in the vocabulary of {self.path}"
                fix = 'name one that is, or "" for none, or leave it out for that of the tokenizer'
                raise invalid(key, "unknown", name, must, fix)
        return Found(found, f"set by {key}")

    def require_end(self) -> None:
        """Raise ValueError where the files of the tokenizer name no end of documents, or several."""
        names = [name for _, name in self.end.tokens]
        fix = 'set eos to the token that ends a document, or to "" for none'
        if len(names) > 1:
            rule = f"is not set, and each of them may end a document of {self.path}"
            raise invalid("eos", "several", names, rule, fix)
        if not names and self.end.reason != "set by eos":
            rule = f"is not set, and {self.path} has no end token: {self.end.reason}"
            raise invalid("eos", "missing", ..., rule, fix)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without the special tokens that a template would add; InvalidData where a word has none."""
        with self._encoding():
            return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of `encode` for each text, in the threads of the library (TOKENIZERS_PARALLELISM)."""
        with self._encoding():
            found = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in found]

    @contextmanager
    def _encoding(self) -> Iterator[None]:
        """A text without tokens as InvalidData: the library raises bare Exception."""
        try:
            yield
        except Exception as error:
            if type(error) is not Exception:
                raise
            rule = f"must encode every text ({error})"
            fix = "add its unknown token to its vocabulary"
            where = str(self.path)
            raise invalid_data("tokenizer", "encode", where, rule, fix) from None

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
        bos = {"bos": [name for _, name in self.begin.tokens]} if self.begin_ids else {}
        ends = {"ends": [name for _, name in self.answers.tokens]} if self.answers.tokens else {}
        about = {"name": "json", "path": str(self.path), "eos": self.eos}
        return {**about, **bos, **ends, "fingerprint": self.fingerprint}


def document_tokenizer(
    name: str, eos: str | None = None, bos: str | None = None
) -> ByteTokenizer | JsonTokenizer:
    """The tokenizer that documents are prepared with: "byte", or the path of a JSON file.

    Raises InvalidData for a missing or broken file, ValueError unless one token, or by `eos = ""` none, ends a document.
    """
    if name == "byte":
        return ByteTokenizer()
    found = JsonTokenizer(name, eos, bos)
    found.require_end()
    return found


def load_tokenizer(spec: Mapping[str, Any] | str) -> Tokenizer:
    """The tokenizer of a spec, of `"byte"`, or of the path of a JSON file.

    Raises ValueError for an unknown name, InvalidData if the file has another fingerprint than the
    spec. Usage: `load_tokenizer(source.tokenizer).decode(ids)`.
    """
    if isinstance(spec, str):
        spec = {"name": "byte"} if spec == "byte" else {"name": "json", "path": spec}

    name = spec.get("name")
    tokenizer: ByteTokenizer | JsonTokenizer
    if name == "byte":
        tokenizer = ByteTokenizer()
    elif name == "json" and spec.get("path"):
        # a spec that was stored has `eos`, null for none, so that the files of the tokenizer do not decide again
        stored = "eos" in spec
        eos, bos = spec.get("eos"), spec.get("bos")
        tokenizer = JsonTokenizer(
            spec["path"],
            eos or ("" if stored else None),
            bos or ("" if stored else None),
            spec.get("ends", ()),
        )
        if stored:
            reason = "as the tokens were made"
            tokenizer.begin = tokenizer.begin._replace(reason=reason)
            tokenizer.end = tokenizer.end._replace(reason=reason)

    else:
        rule = 'must have the name "byte", or "json" and a path'
        raise invalid("tokenizer", "unknown", dict(spec), rule, "use the spec of a source")

    expected = spec.get("fingerprint", tokenizer.fingerprint)
    if expected != tokenizer.fingerprint:
        rule = f"has fingerprint {tokenizer.fingerprint[:16]}, but the tokens were made with {str(expected)[:16]}"
        fix = "put the original file back or prepare the text again"
        raise invalid_data("tokenizer", "mismatch", spec.get("path", name), rule, fix)
    return tokenizer


def _begin(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    """The ids to write before those of a text: none where the text spells them."""
    begin = list(getattr(tokenizer, "begin_ids", ()))  # a tokenizer of your own may have none
    return [] if list(ids[: len(begin)]) == begin else begin


def document_ids(tokenizer: Tokenizer, ids: Any, dtype: Any) -> np.ndarray:
    """The ids of a text as those of a document, between the tokens that begin and end it, each once."""
    end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]  # id 0 is a legal end
    end = [] if list(ids[-1:]) == end else end
    return np.concatenate([np.asarray(part, dtype) for part in (_begin(tokenizer, ids), ids, end)])


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text that a model goes on with, after the tokens that begin a text.

    They are not written twice: a chat template may write them. Usage: `encode_prompt(tokenizer, "Once upon")`.
    """
    ids = list(tokenizer.encode(text))
    return _begin(tokenizer, ids) + ids


def prompt_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of `encode_prompt`, or the end token where there are none: documents begin after it. ValueError without."""
    ids = encode_prompt(tokenizer, text)
    if not ids and tokenizer.eos_id is None:
        rule = "has no tokens and the tokenizer no end token"
        raise invalid("prompt", "empty", text, rule, "give a prompt")
    return ids or [tokenizer.eos_id]  # type: ignore[list-item]


def describe_ends(tokenizer: Tokenizer) -> str:
    """How documents begin and end, with the reason, for a user: `begin with <s> (...), end with </s> (...)`.

    "" for the byte tokenizer, which has nothing to choose.
    """
    if not isinstance(tokenizer, JsonTokenizer):
        return ""
    names = [
        " ".join(name for _, name in t.tokens) or "no token"
        for t in (tokenizer.begin, tokenizer.end)
    ]
    found = f"begin with {names[0]} ({tokenizer.begin.reason}), end with {names[1]} ({tokenizer.end.reason})"
    answers = " ".join(name for _, name in tokenizer.answers.tokens)
    return f"{found}, answers with {answers} (the chat template)" if answers else found


def begin_key(tokenizer: Tokenizer) -> dict[str, Any]:
    """What the tokens that begin documents add to keys and fingerprints; without any, nothing, as in older ones."""
    begin = list(getattr(tokenizer, "begin_ids", ()))
    return {"bos": begin} if begin else {}
