"""Bytes of text that token ids stand for: a loss per byte can be compared between tokenizers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from forge_data.protocols import Tokenizer
from forge_data.tokenizer import ByteTokenizer, JsonTokenizer

__all__ = ["byte_lengths"]

_SPACE = "\u2581"  # as sentencepiece writes it
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def byte_lengths(tokenizer: Tokenizer) -> np.ndarray | None:
    """Bytes of UTF-8 that each id adds to a text, (vocab_size,) int64; 0 for special tokens.

        bits = nats / math.log(2) / byte_lengths(tokenizer)[ids].sum()

    Exact for `ByteTokenizer` and for tokenizers of bytes (GPT-2, Llama 3, Qwen); for those that write spaces as U+2581
    (Llama 2, Gemma) a space that they add before the first word of a text counts. None for others, whose ids do not keep
    a text. A tokenizer of your own may offer a method `byte_lengths()`.
    """
    offer = getattr(tokenizer, "byte_lengths", None)
    if offer is not None:
        return np.asarray(offer(), np.int64)
    if isinstance(tokenizer, ByteTokenizer):
        return np.where(np.arange(tokenizer.vocab_size) < 256, 1, 0)
    if not isinstance(tokenizer, JsonTokenizer):
        return None
    content = tokenizer.content()
    decoders = list(_decoders(content.get("decoder")))
    of_bytes = any(decoder["type"] == "ByteLevel" for decoder in decoders)
    if not of_bytes and not any(_SPACE in json.dumps(d, ensure_ascii=False) for d in decoders):
        return None
    found = np.zeros(tokenizer.vocab_size, np.int64)
    for token, number in tokenizer.vocabulary().items():
        found[number] = len(token) if of_bytes else _length(token)
    for added in content.get("added_tokens", []):  # stand in a text as they are
        found[added["id"]] = 0 if added["special"] else len(added["content"].encode())
    return found


def _length(token: str) -> int:
    return 1 if _BYTE.fullmatch(token) else len(token.replace(_SPACE, " ").encode())


def _decoders(table: Any) -> Iterator[dict[str, Any]]:
    """A decoder, or those of a sequence."""
    if table is not None:
        inner = table.get("decoders")
        yield from [table] if inner is None else (d for each in inner for d in _decoders(each))
