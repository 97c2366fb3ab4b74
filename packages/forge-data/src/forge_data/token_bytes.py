"""Bytes of text that token ids stand for: a loss per byte can be compared between tokenizers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from forge_data.batch import IGNORE, Batch
from forge_data.protocols import Tokenizer
from forge_data.tokenizer import ByteTokenizer, JsonTokenizer

__all__ = ["byte_lengths", "label_bytes"]

_SPACE = "\u2581"  # as sentencepiece writes it
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def byte_lengths(tokenizer: Tokenizer) -> np.ndarray | None:
    """Bytes of UTF-8 that each id adds to a text, (vocab_size,) int64; 0 for special tokens.

        bits = nats / math.log(2) / byte_lengths(tokenizer)[ids].sum()

    Exact for `ByteTokenizer` and for tokenizers of bytes (GPT-2, Llama 3), after NFC for those that normalize by it (Qwen).
    Those that write spaces as U+2581 (Llama 2, Gemma) read a U+2581 of the text as a space. A space that a tokenizer adds
    before a text counts, and blanks that a special token takes with it do not. None where the normalizer, the pre-tokenizer,
    the model or an added token drops or changes text, and for parts that are not known to keep it. A tokenizer of your own
    may offer a method `byte_lengths()`.
    """
    offer = getattr(tokenizer, "byte_lengths", None)
    if offer is not None:
        return np.asarray(offer(), np.int64)
    if isinstance(tokenizer, ByteTokenizer):
        return np.where(np.arange(tokenizer.vocab_size) < 256, 1, 0)
    if not isinstance(tokenizer, JsonTokenizer):
        return None

    content = tokenizer.content()
    decoders = list(_parts(content.get("decoder")))
    of_bytes = any(decoder["type"] == "ByteLevel" for decoder in decoders)
    if not of_bytes and not any(_SPACE in json.dumps(d, ensure_ascii=False) for d in decoders):
        return None
    vocabulary = tokenizer.vocabulary()
    if not _keeps_text(content, vocabulary, of_bytes):
        return None

    found = np.zeros(tokenizer.vocab_size, np.int64)
    for token, number in vocabulary.items():
        found[number] = len(token) if of_bytes else _length(token)
    # they stand in a text as they are, so that their letters are no bytes
    for added in content.get("added_tokens", []):
        found[added["id"]] = 0 if added["special"] else len(added["content"].encode())
    return found


def label_bytes(batch: Batch, lengths: np.ndarray) -> float:
    """Weighted bytes of text that the labels of a batch on the host stand for; `lengths` as of `byte_lengths`."""
    valid = batch.labels != IGNORE
    weights = 1.0 if batch.weights is None else batch.weights[valid].double().numpy()
    return float(np.sum(lengths[batch.labels[valid].numpy()] * weights))


def _length(token: str) -> int:
    return 1 if _BYTE.fullmatch(token) else len(token.replace(_SPACE, " ").encode())


def _keeps_text(content: dict[str, Any], vocabulary: Mapping[str, int], of_bytes: bool) -> bool:
    """Whether the ids of any text stand for all of it: every part must be known to keep it."""
    parts = [*_parts(content.get("normalizer")), *_parts(content.get("pre_tokenizer"))]
    if of_bytes:
        known = (
            any(part["type"] == "ByteLevel" for part in parts) and _letters() <= vocabulary.keys()
        )
    else:
        names = {f"<0x{byte:02X}>" for byte in range(256)}
        known = bool(content["model"].get("byte_fallback")) and names <= vocabulary.keys()
    marks = ("continuing_subword_prefix", "end_of_word_suffix")  # letters that are not of the text
    return (
        known
        and all(_keeps(part, of_bytes) for part in parts)
        and not any(content["model"].get(mark) for mark in marks)
        and not any(t["lstrip"] or t["rstrip"] for t in content["added_tokens"] if not t["special"])
    )


def _keeps(part: dict[str, Any], of_bytes: bool) -> bool:
    """Whether a normalizer or a pre-tokenizer keeps text. UnicodeScripts drops blanks at the begin of a text."""
    match part:
        case {"type": "NFC" | "ByteLevel" | "Digits" | "FixedLength"}:
            return True
        case {"type": "Split" | "Punctuation", "behavior": behavior}:
            return bool(behavior != "Removed")
        case {"type": "Prepend", "prepend": content}:
            return content == " " if of_bytes else content in (" ", _SPACE)
        case {"type": "Replace", "pattern": {"String": " "}, "content": content}:
            return not of_bytes and content == _SPACE
        case {"type": "Metaspace", "replacement": content}:
            return not of_bytes and content == _SPACE
    return False


def _letters() -> set[str]:
    """The letters by which tokenizers of bytes write all bytes."""
    from tokenizers.pre_tokenizers import ByteLevel

    return set(ByteLevel.alphabet())


def _parts(table: Any) -> Iterator[dict[str, Any]]:
    """A part of a tokenizer file, or those of a sequence."""
    if table is not None:
        inner = [table.get(key) for key in ("decoders", "normalizers", "pretokenizers")]
        each = next((parts for parts in inner if parts is not None), None)
        yield from [table] if each is None else (p for part in each for p in _parts(part))
