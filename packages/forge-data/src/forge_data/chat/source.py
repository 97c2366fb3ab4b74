"""Chat source: conversations rendered by a template, which makes its own sequences."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forge_data._shared.paths import user_path
from forge_data._shared.problems import Problem, raise_problems
from forge_data._shared.record_keys import RecordKeys, unread_keys
from forge_data.chat.messages import conversation_of, find_conversations, read_records
from forge_data.chat.rows import (
    COUNTS,
    TRAINED_TOKENS,
    UNTRAINED,
    ChatStream,
    Rendering,
    cached,
    cut_to_nothing,
    offsets_digest,
)
from forge_data.chat.template import ChatTemplate
from forge_data.errors import InvalidData, invalid_data
from forge_data.kinds import ChatConfig
from forge_data.tokenizer import load_tokenizer
from forge_data.tokens.cache import Entry, Header
from forge_data.tokens.files import TokenFiles
from forge_data.tokens.format import digest_once

if TYPE_CHECKING:
    from forge_data.config import SourceConfig

__all__ = ["Conversations", "open_header", "open_source"]


CHAT_VERSION = 2  # part of every fingerprint: raise it whenever a row would change
_RENDERING = 4  # of the cache: raise it where the same files get other tokens, weights or counts
_EXAMPLES = 3
# what a line says of conversations that are too long; the third choice raises
_DONE = {"truncate": "cut to it", "skip": "left out"}


class Conversations:
    """Conversations of files, rendered by a template once and then read from a cache on disk.

        talks = Conversations("talks.jsonl", ChatConfig(tokenizer="Qwen3-0.6B"))
        loader = Loader(talks.stream(seq_len=2048, seed=0), global_batch=16)

    Opening reads all files for their digests, and renders what the cache does not have: about a millisecond a
    conversation. Raises InvalidData naming file and line of the first broken one, ValueError where a library
    is missing.
    """

    def __init__(self, path: str | Path, config: ChatConfig, split: str = "train") -> None:
        self.config = config
        self._files = find_conversations(user_path(path), split)
        self._keys = RecordKeys(config.ignore_keys, config.strict, InvalidData)
        template = ChatTemplate(config)
        self.tokenizer: dict[str, Any] | None = template.spec()
        self.vocab_size: int | None = template.vocab_size
        self._fingerprint = _fingerprint(template, self._files, split)
        self.rendered = cached(
            _entry(path, config, self._fingerprint),
            template.vocab_size,
            self.tokenizer,
            lambda: self._render(template),
            self._keys,
        )

    @property
    def max_token_id(self) -> int:
        """The largest id of any conversation."""
        return self.rendered.tokens.max_token_id

    def fingerprint(self) -> dict[str, str | int]:
        """Digests of the files, the tokenizer, the template, and of the result (a template may insert today's date)."""
        tokens = self.rendered.tokens
        return {
            **self._fingerprint,
            "conversations": tokens.num_documents,
            "num_tokens": tokens.num_tokens,
            "tokens": str(tokens.fingerprint()["tokens"]),
            "documents": offsets_digest(self.rendered),
            "weights": str(self.rendered.counts["sha256"]),
        }

    def stream(self, seq_len: int, seed: int = 0) -> ChatStream:
        """Rows of `seq_len` tokens, shuffled by `seed`. Raises InvalidData as `row_problems` says."""
        raise_problems("", self.row_problems(seq_len), InvalidData)
        policy = self.config.too_long
        fingerprint = {
            **self.fingerprint(),
            "too_long": policy,
            "too_long_conversations": len(self._too_long(seq_len)),
        }
        stream = ChatStream(self.rendered, fingerprint, seq_len, seed, self._left_out(seq_len))
        line = _summary(stream.counts, self.rendered.counts)
        stream.warnings, stream.source_lines = self.warnings(seq_len), [line]
        return stream

    def row_problems(self, seq_len: int) -> list[Problem]:
        """Why there are no rows of `seq_len` tokens: conversations that are longer, where config does not allow them."""
        long, total = self._too_long(seq_len), self.rendered.tokens.num_documents
        if len(long) and self.config.too_long == "refuse":
            places = ", ".join(self._place(i) for i in long[:_EXAMPLES])
            places += " and others" if len(long) > _EXAMPLES else ""
            longest = int(self.rendered.lengths.max())
            rule = f"must be at least {longest}, as {len(long)} of {total} conversations are longer: {places}"
            fix = 'raise it, or set chat.too_long = "truncate" or "skip"'
            return [Problem("seq_len", "too_long", seq_len, rule, fix)]
        if len(self._left_out(seq_len)) == total:
            rule = f"must be larger, as all {total} conversations have more tokens and are left out"
            return [Problem("seq_len", "all_skipped", seq_len, rule, "raise it")]
        return []

    def warnings(self, seq_len: int) -> list[str]:
        """Sentences about conversations that are too long, without a label or an end, or with special tokens in their text."""
        found, total = [], self.rendered.tokens.num_documents
        long, done = self._too_long(seq_len), _DONE.get(self.config.too_long)
        if len(long) and done:
            found.append(
                f"{len(long)} of {total} conversations have more than seq_len {seq_len} tokens and are {done}"
            )

        if self.config.too_long == "truncate" and (cut := len(self._left_out(seq_len))):
            found.append(
                f"{cut} of {total} conversations have no label in their first {seq_len} tokens and are left out"
            )

        if without := self.rendered.counts["without_end"]:
            found.append(
                f"{without} of {self.rendered.counts['answers']} answers end without a token that generation stops at, so the "
                "model does not learn to end them: use a template that writes an end token after each"
            )

        counts = {
            UNTRAINED: "nothing to learn",
            "with_specials": "special tokens in the text of a message or a tool, which are ids like those that the template "
            "puts there",
        }
        found += [
            f"{n} of {total} conversations have {what}"
            for name, what in counts.items()
            if (n := self.rendered.counts[name])
        ]
        return found

    def _left_out(self, seq_len: int) -> np.ndarray:
        """Conversations that no row has: too long ones or, of those that are cut, the ones without a label."""
        if self.config.too_long == "truncate":
            return cut_to_nothing(self.rendered, seq_len)
        return self._too_long(seq_len)

    def _too_long(self, seq_len: int) -> np.ndarray:
        return np.flatnonzero(self.rendered.lengths > seq_len)

    def _place(self, conversation: int) -> str:
        """File and line of a conversation; reads the files up to it."""
        return next(islice(read_records(self._files), int(conversation), None)).place

    def _render(self, template: ChatTemplate) -> Iterator[Rendering]:
        record = None
        for record in read_records(self._files):
            conversation = conversation_of(record, self.config, self._keys)
            template.check_keys(conversation, self._keys)
            ids, weights, ends = template.encode_answers(conversation)
            yield Rendering(ids, weights, template.holds_specials(conversation), ends)
        if record is None:
            where, rule = self._files[0], "must hold a conversation, and has none"
            fix = "add one, or correct the path"
            raise invalid_data("", "empty", ..., rule, fix, where=where)


def open_source(config: SourceConfig) -> Conversations:
    """The conversations of a config of `name = "chat"`."""
    return Conversations(config.path or "", config.chat, config.split)


def open_header(config: SourceConfig) -> Header:
    """What is known before conversations are rendered; the number of tokens is, if they are in the cache."""
    template = ChatTemplate(config.chat)
    files = find_conversations(user_path(config.path or ""), config.split)
    header = Header(load_tokenizer(template.spec()))
    header.vocab_size, header.max_token_id = template.vocab_size, template.vocab_size - 1
    entry = _entry(config.path or "", config.chat, _fingerprint(template, files, config.split))
    if entry.folder.is_dir():
        # a damaged entry raises nothing here, as it will be written again
        with contextlib.suppress(InvalidData, OSError, ValueError, KeyError):
            tokens = TokenFiles(entry.folder, verify="off")
            header.num_tokens = tokens.num_tokens
            counts = json.loads((entry.folder / COUNTS).read_text())
            whole = (
                tokens.num_documents,
                tokens.num_tokens,
                counts[TRAINED_TOKENS],
            )  # language: a key of chat.json, as caches on disk have it
            header.known = _summary(whole, counts)
            if done := _DONE.get(config.chat.too_long):
                header.known += f"; conversations of more than seq_len tokens are counted whole, and {done} when a run starts"
    return header


def _fingerprint(template: ChatTemplate, files: list[Path], split: str) -> dict[str, str | int]:
    """What determines ids and weights, but for the library and the date, which a template may insert."""
    config = template.config
    return {
        "kind": f"chat-{CHAT_VERSION}",
        "split": split,
        "files": len(files),
        "content": _digest([digest_once(file) for file in files]),
        "tokenizer": str(template.spec()["fingerprint"]),
        "template": template.digest(),
        "specials": _digest(sorted(map(str, template.tokenizer.special_tokens_map.items()))),
        "messages_field": config.messages_field,
        "tools_field": str(config.tools_field),
        "train_on": config.train_on,
    }


def _summary(trained: tuple[int, int, int], counts: Mapping[str, Any]) -> str:
    conversations, tokens, labels = trained
    line = f"{conversations:,} conversations, {tokens:,} tokens, {labels:,} trained"
    return line + unread_keys(counts["not_read"])


def _entry(path: str | Path, config: ChatConfig, fingerprint: dict[str, str | int]) -> Entry:
    key = {
        **fingerprint,
        "transformers": version("transformers"),
        "rendering": _RENDERING,
        "keys": [sorted(config.ignore_keys), config.strict],
    }
    return Entry.of(config.cache, str(path), key)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
