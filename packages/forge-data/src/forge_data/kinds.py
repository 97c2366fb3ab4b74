"""Tables of options that one kind of source reads: `[data.sources.X.text]` belongs to `text` sources."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from forge_data._shared.fields import field
from forge_data._shared.problems import Problem, raise_problems
from forge_data._shared.record_keys import option_problems

__all__ = ["CACHED", "BorderConfig", "ChatConfig", "HuggingFaceConfig", "TextConfig", "is_streamed"]


def path_problems(path: str | Path, key: str = "path") -> Iterator[Problem]:
    """Problems of a path that no file can have, found before anything is opened."""
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError:
        encoded = b"\0"
    if b"\0" in encoded:
        rule = "must be a file name, without NUL or lone surrogates"
        yield Problem(key, "file_name", str(path), rule, "correct it")


def is_int(value: Any, minimum: int, maximum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= maximum


def is_weight(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and 0 <= value < float("inf")


def integer_problem(key: str, value: Any, least: int, most: int, fix: str) -> Iterator[Problem]:
    """The problem of a value that is not an integer in a range."""
    if not is_int(value, least, most):
        yield Problem(key, "range", value, f"must be an integer from {least} to {most}", fix)


def choice_problems(config: Any) -> Iterator[Problem]:
    """A problem for each field of a dataclass that is neither a value of its Literal nor its default."""
    for name, hint in get_type_hints(type(config)).items():
        choices = next(
            (get_args(h) for h in (hint, *get_args(hint)) if get_origin(h) is Literal), ()
        )
        value = getattr(config, name)
        if choices and value not in (*choices, getattr(type(config), name)):
            rule = f"must be one of {', '.join(choices)}"
            yield Problem(name, "unknown", value, rule, "name one of them")


#: Formats of token ids that are read where they are: they can be mapped, so that no cache is written.
RAW_KINDS = ("megatron", "nanogpt", "npy")
_LAST_ID = 2**31 - 1


@dataclass(frozen=True)
class BorderConfig:
    """Which id stands between documents; without one all is one document. `BorderConfig(eos_id=50256)`."""

    eos_id: int | None = None
    """id that ends each document (nanoGPT: 50256)"""
    bos_id: int | None = None
    """id that begins each document (llm.c, modded-nanogpt: 50256)"""

    def __post_init__(self) -> None:
        raise_problems("source", self._problems())

    def _problems(self) -> Iterator[Problem]:
        for name, value in vars(self).items():
            if value is not None:
                yield from integer_problem(name, value, 0, _LAST_ID, "give the id of the tokenizer")
        if self.eos_id is not None and self.bos_id is not None:
            rule = f"must not be given with bos_id {self.bos_id}: each sets where documents begin"
            yield Problem("eos_id", "excludes", self.eos_id, rule, "remove one of them")


IGNORED = "keys of records that are left out although they hold content that is not read, such as tools or messages.loss"
STRICT = "any key of a record that is not read is an error"


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
    yield from choice_problems(c)


#: Kinds with a table of their own: a field of SourceConfig by the same name, as it is found by it.
TABLES = ("huggingface", "text", "chat", "nanogpt", "npy")
#: Kinds without ids: they are tokenized into a cache once, and read from there like token files.
CACHED = ("huggingface", "text", "chat")
DOCUMENTS = ("file", "line", "blank_line")
#: What `path` names, of kinds that need one: the error of a missing path says it.
_PATHS = {
    "tokens": "a folder written by `forge-data prepare`, or a raw file of ids,",
    "text": "text files",
    "huggingface": "a folder, or a set of the hub,",
    "chat": "conversations",
    **dict.fromkeys(RAW_KINDS, "files of token ids"),
}
_FITTING = "whose tokens have the type that fits"
_RAW = {"dtype": "whose files contain it", "verify": "which has no digests"}
#: Keys that a kind does not take, with the reason that the error gives.
_NOT_TAKEN = {
    "builtin": dict.fromkeys(("path", "dtype", "verify"), "whose text comes with Python"),
    "text": {"dtype": _FITTING},
    "huggingface": {"dtype": _FITTING},
    "chat": {"dtype": _FITTING, "verify": "whose tokens are always compared"},
    "megatron": _RAW,
    "nanogpt": {"verify": _RAW["verify"]},
    "npy": _RAW,
}
EOS_HELP = 'token that ends a document, or "" for no token (default: that of the tokenizer)'
BOS_HELP = (
    'token that begins a document, or "" for no token (default: as the tokenizer begins a text)'
)


@dataclass(frozen=True)
class HuggingFaceConfig:
    """How a set of the `datasets` library is read: `HuggingFaceConfig(split="test", text_field="content")`."""

    config_name: str | None = None
    """configuration of a set that has several"""
    split: str | None = None
    """split as the set calls it, or a slice of one (default: that of the source)"""
    text_field: str = "text"
    """column of the text"""
    tokenizer: str = "byte"
    """"byte", or a JSON file of the tokenizers library"""
    eos: str | None = field(None, EOS_HELP)
    bos: str | None = field(None, BOS_HELP)
    ignore_keys: list[str] = field(list, IGNORED)
    strict: bool = field(False, STRICT)
    cache: str | None = None
    """folder of the tokens (default: $FORGE_CACHE/tokens, below ~/.cache/forge)"""
    streaming: bool = False
    """read and tokenize while training, front to back, without a cache; for training only"""
    virtual_shards: int = 256
    """streaming: parts that are read side by side, at most as many as row groups or files"""
    shuffle_window: int = 256
    """streaming: documents of a shard that are shuffled and packed together"""

    def __post_init__(self) -> None:
        raise_problems("huggingface", _hugging_face_problems(self))


@dataclass(frozen=True)
class TextConfig:
    """Options of `name = "text"`, its documents and tokenizer: `TextConfig(document="line", validation_every=20)`."""

    tokenizer: str = "byte"
    """"byte", or a JSON file of the tokenizers library"""
    eos: str | None = field(None, EOS_HELP)
    bos: str | None = field(None, BOS_HELP)
    document: Literal["file", "line", "blank_line"] = "file"
    """unit of a document in .txt and .md files"""
    text_field: str = "text"
    """key of the text in JSON lines, column of the text in csv and parquet"""
    validation_every: int = 0
    """every N-th document is of the split validation (default: as folders train/ and validation/ say)"""
    ignore_keys: list[str] = field(list, IGNORED)
    strict: bool = field(False, STRICT)
    cache: str | None = None
    """folder of the tokens (default: $FORGE_CACHE/tokens, below ~/.cache/forge)"""

    def __post_init__(self) -> None:
        raise_problems("text", _text_problems(self))


def foreign_tables(config: Any, tables: Sequence[str] = TABLES) -> Iterator[Problem]:
    """Problems of keys off their defaults in the table of another kind than `config.name`."""
    for kind in tables:
        own = getattr(config, kind)
        for key, value in vars(own).items():
            if config.name != kind and value != getattr(type(own)(), key):
                rule = f"is a key of name {kind!r}, and name is {config.name!r}"
                fix = f'remove it, or use name = "{kind}"'
                yield Problem(f"{kind}.{key}", "foreign", value, rule, fix)


def kind_problems(config: Any) -> Iterator[Problem]:
    """Problems of the keys of a source with its name, without those of its table."""
    name, table = str(config.name), config.huggingface
    if name in _PATHS and not config.path:
        rule = f"must name {_PATHS[name]} when name is {name!r}"
        yield Problem("path", "missing", config.path, rule, "set path")
    for key, why in _NOT_TAKEN.get(name, {}).items():
        if (value := getattr(config, key)) != getattr(type(config), key):
            rule = f"must not be given when name is {name!r}, {why}"
            yield Problem(key, "excludes", value, rule, f"remove {key}")

    if name == "chat" and config.chat.tokenizer is None:
        rule = "must name a tokenizer of transformers when name is 'chat'"
        fix = "set it to the folder of the model that is trained"
        yield Problem("chat.tokenizer", "missing", ..., rule, fix)
    if name == "huggingface" and table.streaming and config.verify != "touch":
        rule = "must be 'touch' when streaming, which has no digests"
        yield Problem("verify", "excludes", config.verify, rule, "remove it")
    if name == "huggingface" and table.split is not None and config.split != "train":
        rule = f"must not be given with huggingface.split {table.split!r}"
        yield Problem("split", "excludes", config.split, rule, "remove one of them")


def streaming_problems(
    sources: Mapping[str, Any], validation: Any, phases: Mapping[str, Any], seq_len: int
) -> Iterator[Problem]:
    """What a source that is streamed cannot do, as its number of rows is not known."""
    for name, source in sources.items():
        if not is_streamed(source):
            continue
        if source.max_epochs is not None:
            rule = "must not be given for a streaming source, whose shards end one by one"
            fix = "remove it, or tokenize the set with streaming = false"
            yield Problem(f"sources.{name}.max_epochs", "streaming", source.max_epochs, rule, fix)
        if len(sources) > 1 and source.weight is None:
            rule = "must be given for a streaming source, whose rows are not counted"
            yield Problem(f"sources.{name}.weight", "missing", ..., rule, "give all sources one")

        for phase, table in phases.items():
            if table.seq_len not in (None, seq_len):
                rule = f"must be seq_len {seq_len}, as sources.{name} streams and cannot start over"
                fix = "leave it out, or set streaming = false"
                yield Problem(f"phases.{phase}.seq_len", "mismatch", table.seq_len, rule, fix)

    if validation is not None and is_streamed(validation):
        rule = "must not be streaming, as it takes the same rows each time"
        yield Problem("validation", "streaming", ..., rule, "set streaming = false there")


def is_streamed(source: Any) -> bool:
    """Whether a SourceConfig reads a set of `datasets` while a run goes on, or has `streaming` among the options of its own
    factory. Usage: `is_streamed(config.sources["web"])`."""
    own = source.name == "huggingface" and source.huggingface.streaming
    return bool(own or source.options.get("streaming"))


def _tokenizer_problems(config: Any) -> Iterator[Problem]:
    if not config.tokenizer:
        rule = 'must be "byte" or the path of a JSON file'
        yield Problem("tokenizer", "empty", config.tokenizer, rule, 'use "byte"')
    for key, value in (("eos", config.eos), ("bos", config.bos)):
        if value is not None and config.tokenizer == "byte":
            rule = "must not be given with the byte tokenizer, which has an end and no begin token"
            yield Problem(key, "excludes", value, rule, "remove it")
    yield from option_problems(config.ignore_keys, config.strict)
    if not config.text_field:
        yield Problem("text_field", "empty", config.text_field, "must name a column", 'use "text"')
    for key in ("tokenizer", "cache"):
        yield from path_problems(getattr(config, key) or "", key)
    if config.cache == "":
        yield Problem("cache", "empty", "", "must name a folder", "remove it for the default one")


def _hugging_face_problems(config: HuggingFaceConfig) -> Iterator[Problem]:
    yield from _tokenizer_problems(config)
    if config.split == "":
        fix = "remove it for the one of the source"
        yield Problem("split", "empty", "", "must name a split of the set", fix)

    for key, most in (("virtual_shards", 1 << 16), ("shuffle_window", 1 << 24)):
        value = getattr(config, key)
        yield from integer_problem(key, value, 1, most, "use 256")
        if (
            not config.streaming
            and is_int(value, 1, most)
            and value != getattr(HuggingFaceConfig, key)
        ):
            fix = "remove it, or set streaming = true"
            yield Problem(key, "requires", value, "must not be given without streaming", fix)

    if config.streaming and config.cache is not None:
        rule = "must not be given when streaming, which writes none"
        yield Problem("cache", "excludes", config.cache, rule, "remove it")
    if config.streaming and "[" in (config.split or ""):
        rule = "must be a full split when streaming"
        yield Problem("split", "slice", config.split, rule, "name one, or do not stream")


def _text_problems(config: TextConfig) -> Iterator[Problem]:
    yield from _tokenizer_problems(config)
    yield from choice_problems(config)
    if not is_int(every := config.validation_every, 0, 1 << 60) or every == 1:
        rule = "must be 0 (none) or at least 2"
        yield Problem("validation_every", "range", every, rule, "use 20 for 5 %")
