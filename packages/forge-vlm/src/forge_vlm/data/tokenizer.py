"""Pieces of a conversation to ids; text of users never becomes a special token.

T   tokens of a conversation
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from forge_vlm._shared.paths import read_regular, user_path
from forge_vlm._shared.problems import ProblemError
from forge_vlm._shared.special_tokens import begin_tokens, end_tokens
from forge_vlm._shared.tokenizer_settings import switch_off_settings
from forge_vlm.data.files import invalid
from forge_vlm.data.templates import ChatSegment

__all__ = ["ByteTokens", "JsonTokens", "Tokens", "open_tokenizer"]

#: As `bos`: no token.
NONE = ("", "none")
_MOST_KNOWN = 4096  # texts of images whose ids are held
_MOST_BYTES = 1 << 28  # of a tokenizer's JSON


class Tokens(Protocol):
    """Ids of segments; `spec` is plain data from which forge_data's `load_tokenizer` makes the tokenizer of their text.

    `begin` are the names of the tokens that begin a sample, none where it is empty.
    """

    begin: tuple[str, ...]
    vocab_size: int
    eos_id: int
    image_id: int
    image: str
    fingerprint: str
    spec: dict[str, Any] | None

    def encode(self, pieces: Sequence[ChatSegment]) -> tuple[np.ndarray, np.ndarray]:
        """(ids, number of the segment of each), both (T,) int64. Text of an image holds the placeholder `image`."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; special tokens, and ids that are none of its own, are left out."""
        ...


class ByteTokens:
    """UTF-8 bytes 0 to 255, 256 the end, 257 the place of an image. Other special tokens are their text."""

    vocab_size, eos_id, image_id, image = 258, 256, 257, "<image>"
    fingerprint = "bytes"
    spec: dict[str, Any] | None = {"name": "byte"}  # noqa: RUF012 - never changed

    def __init__(self, bos: str | None = None) -> None:
        self.begin: tuple[str, ...] = () if bos in (None, *NONE) else (str(bos),)

    def encode(self, pieces: Sequence[ChatSegment]) -> tuple[np.ndarray, np.ndarray]:
        """As `Tokens.encode`."""
        return _joined([self._alone(piece) for piece in pieces])

    def decode(self, ids: Sequence[int]) -> str:
        """As `Tokens.decode`; bytes that are no UTF-8 become the replacement character."""
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def _alone(self, piece: ChatSegment) -> list[int]:
        if piece.kind == "end":
            return [self.eos_id]
        if piece.kind != "image":
            return list(piece.text.encode())
        first, *rest = (list(text.encode()) for text in piece.text.split(self.image))
        return [*first, *(i for text in rest for i in (self.image_id, *text))]


class JsonTokens:
    """A `tokenizer.json`, with the names of its end token, of its mark of images, and of the token that begins a sample.

    Without eos, `end_tokens` of the tokenizer's files is the end; without bos, their `begin_tokens` begin a sample, with
    "" or "none" no token does.

    A conversation is encoded as one text, as its model's own processor does. Where text of a user has the name of a
    special token, each segment is encoded by itself, and the name is text like any other. Raises ValueError where the file,
    the library or a name is missing.
    """

    def __init__(
        self, path: str | Path, eos: str | None, image: str, bos: str | None = None
    ) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError:
            rule, fix = "needs the tokenizers library", "pip install 'forge-vlm[data]'"
            value = str(path)
            raise invalid("tokenizer", "requires", value, rule, fix, kind=ProblemError) from None

        path = user_path(path)
        path = path / "tokenizer.json" if path.is_dir() else path
        try:
            content = read_regular(path, _MOST_BYTES)
            self._tokenizer: Any = Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises plain exceptions
            rule, fix = f"must be a tokenizer.json or its folder ({error})", "correct the path"
            raise invalid(
                "tokenizer", "unreadable", str(path), rule, fix, kind=ProblemError
            ) from None

        switch_off_settings(self._tokenizer)
        folder = path.parent if path.name == "tokenizer.json" else None
        eos = eos or self._end(folder, path)
        self.path, self.eos, self.image = path, eos, image
        self.eos_id, self.image_id = self._id(eos), self._id(image)
        names = (
            [name for _, name in begin_tokens(self._tokenizer, folder).tokens]
            if bos is None
            else [bos]
        )
        self.begin = () if bos in NONE else tuple(names)

        for name in self.begin:
            self._id(name)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {i for i, token in added.items() if token.special}
        self._special |= {self.eos_id, self.image_id}
        self._specials = np.array(sorted(self._special))
        self._ids_of: dict[str, list[int]] = {}
        self.vocab_size = 1 + max(self._tokenizer.get_vocab().values())  # ids may have holes
        self.fingerprint = hashlib.sha256(content).hexdigest()

        self.spec: dict[str, Any] | None = {
            "name": "json",
            "path": str(path.resolve()),
            "eos": eos,
            **({"bos": list(self.begin)} if self.begin else {}),
            "fingerprint": self.fingerprint,
        }

    def encode(self, pieces: Sequence[ChatSegment]) -> tuple[np.ndarray, np.ndarray]:
        """As `Tokens.encode`; InvalidSample for text that becomes the mark of images or the end token all the same."""
        texts = [self.eos if p.kind == "end" else p.text for p in pieces]
        own = [
            None
            if p.kind == "text"
            else self._known(t)
            if p.kind in ("image", "template")
            else [self._id(t)]
            for p, t in zip(pieces, texts)
        ]
        self._tokenizer.encode_special_tokens = False
        found = self._encoding("".join(texts))
        ids = np.array(found.ids, np.int64)
        spans = np.array(found.offsets, np.int64).reshape(-1, 2)  # (T, 2), in characters
        last = np.maximum(spans[:, 0], spans[:, 1] - 1)

        owners = np.searchsorted(np.cumsum([len(t) for t in texts]), last, side="right")
        owners = np.minimum(owners, len(texts) - 1)
        special = np.isin(ids, self._specials)
        wanted = [(n, i) for n, known in enumerate(own) for i in known or () if i in self._special]
        if [*zip(owners[special].tolist(), ids[special].tolist())] == wanted:
            return ids, owners

        return _joined([self._text(t) if k is None else k for t, k in zip(texts, own)])

    def decode(self, ids: Sequence[int]) -> str:
        """As `Tokens.decode`."""
        kept = [i for i in ids if i < self.vocab_size and i not in self._special]
        return str(self._tokenizer.decode(kept))

    def _end(self, folder: Path | None, path: Path) -> str:
        """The end of the tokenizer's files; ValueError unless they name one."""
        found = end_tokens(self._tokenizer, folder)
        names = [name for _, name in found.tokens]
        if len(names) != 1:
            rule = f"is not set, and the end token of {path} is not known: {found.reason}"
            code, fix = (
                "several" if names else "missing",
                "set eos to the token that ends an answer",
            )
            raise invalid("eos", code, names or ..., rule, fix, kind=ProblemError)
        return names[0]

    def _encoding(self, text: str) -> Any:
        try:
            return self._tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:  # the library raises bare Exception
            if type(error) is not Exception:
                raise
            rule = f"cannot be encoded by its tokenizer ({error})"
            raise invalid("text", "encode", text, rule, "add the unknown token to it") from None

    def _text(self, text: str) -> list[int]:
        """Ids of text of a user by itself."""
        self._tokenizer.encode_special_tokens = True
        ids: list[int] = self._encoding(text).ids
        # a token that was added without being special is found in any text
        held = {self.image_id: self.image, self.eos_id: self.eos}.keys() & set(ids)
        if held:
            token = self.image if self.image_id in held else self.eos
            rule = f"holds {token!r}, a token that its tokenizer reads in any text"
            fix = "declare it special there, or take it out of the text, where a tokenizer of whole words reads it in either case"
            raise invalid("text", "special", text, rule, fix)
        return ids

    def _known(self, text: str) -> list[int]:
        """Ids of what stands for an image, or of a template, by themselves."""
        if text not in self._ids_of:
            self._tokenizer.encode_special_tokens = False
            ids = self._encoding(text).ids
            if len(self._ids_of) >= _MOST_KNOWN:
                self._ids_of.clear()
            self._ids_of[text] = ids
        return self._ids_of[text]

    def _id(self, name: str) -> int:
        found: int | None = self._tokenizer.token_to_id(name)
        if found is None:
            rule = f"has no token {name!r}, which the template, eos, bos or image names"
            fix = "name one that it has"
            raise invalid("tokenizer", "no_token", str(self.path), rule, fix, kind=ProblemError)
        return found


def _joined(each: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    ids = np.array([i for part in each for i in part], np.int64)
    return ids, np.repeat(np.arange(len(each)), [len(part) for part in each])


def open_tokenizer(name: str, eos: str | None, image: str, bos: str | None = None) -> Tokens:
    """ "byte", or the path of a tokenizer.json or of its folder."""
    return ByteTokens(bos) if name == "byte" else JsonTokens(name, eos, image, bos)
