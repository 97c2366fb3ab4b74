"""[data.sources.N.chat]: how conversations become rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from forge_data._problems import path_problems
from forge_data._shared.fields import field
from forge_data._shared.problems import Problem, raise_problems
from forge_data._shared.record_keys import option_problems

IGNORED = "keys of records that are left out although they hold content that is not read, such as tools or messages.loss"
STRICT = "any key of a record that is not read is an error"
TRAIN_ON = ("assistant", "last", "all")
TOO_LONG = ("refuse", "truncate", "skip")


@dataclass(frozen=True)
class ChatConfig:
    """Options of `name = "chat"`. Raises ValueError with one line per broken rule.

    Usage: `SourceConfig("chat", "talks.jsonl", chat=ChatConfig(tokenizer="Qwen3-0.6B"))`.
    """

    tokenizer: str | None = None
    """folder of a tokenizer of transformers, which has tokenizer.json and a chat template"""
    template: str | None = None
    """file of a jinja template, in place of the tokenizer's own"""
    messages_field: str = "messages"
    """key of the list of messages in a record"""
    tools_field: str | None = None
    """key of the list of tools that the template is given (default: no tools)"""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """what has labels: every message of the assistant, its last one, or all tokens"""
    too_long: Literal["refuse", "truncate", "skip"] = "refuse"
    """what becomes of a conversation of more than seq_len tokens: an error, its first seq_len tokens, or none of
    it; both are counted"""
    ignore_keys: list[str] = field(list, IGNORED)
    strict: bool = field(False, STRICT)
    cache: str | None = None
    """folder of the tokens (default: $FORGE_CACHE/tokens, below ~/.cache/forge)"""

    def __post_init__(self) -> None:
        raise_problems("chat", _problems(self))


def _problems(c: ChatConfig) -> Iterator[Problem]:
    yield from option_problems(c.ignore_keys, c.strict)
    for key in ("tokenizer", "template", "cache"):
        value = getattr(c, key)
        if value == "":
            yield Problem(key, "empty", value, "must name a path", "give one, or remove it")
        yield from path_problems(value or "", key)
    for key in ("messages_field", "tools_field"):
        if getattr(c, key) == "":
            fix = "use 'messages', or remove it"
            yield Problem(key, "no_key", "", "must name a key of the records", fix)
    for key, choices in (("train_on", TRAIN_ON), ("too_long", TOO_LONG)):
        if (value := getattr(c, key)) not in choices:
            rule = f"must be one of {', '.join(choices)}"
            yield Problem(key, "unknown", value, rule, f"use {choices[0]!r}")


def chat_problems(chat: ChatConfig, verify: str) -> Iterator[Problem]:
    """Problems of a source of name chat, without those of its table."""
    if chat.tokenizer is None:
        rule = "must name a tokenizer of transformers when name is 'chat'"
        fix = "set it to the folder of the model that is trained"
        yield Problem("chat.tokenizer", "missing", ..., rule, fix)
    if verify != "touch":
        rule = "must be 'touch' when name is 'chat', whose tokens are always compared"
        yield Problem("verify", "excludes", verify, rule, "remove verify")
