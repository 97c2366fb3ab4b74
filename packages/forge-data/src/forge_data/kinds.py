"""Tables of options that one kind of source alone reads: `[data.sources.X.text]` belongs to `name = "text"`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from forge_data._problems import every_problems, path_problems, special_problems
from forge_data._shared.fields import field
from forge_data._shared.problems import Problem, raise_problems
from forge_data._shared.record_keys import option_problems
from forge_data.chat.config import IGNORED, STRICT, ChatConfig

__all__ = ["CACHED", "ChatConfig", "HuggingFaceConfig", "TextConfig", "is_streamed"]

#: Kinds with a table of their own, which is a field of SourceConfig by the same name.
TABLES = ("huggingface", "text", "chat", "nanogpt", "npy")
#: Kinds whose tokens are in a cache, from which they are read like token files.
CACHED = ("huggingface", "text", "chat")
DOCUMENTS = ("file", "line", "blank_line")
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
    """How text is cut into documents and tokenized: `TextConfig(document="line", validation_every=20)`."""

    tokenizer: str = "byte"
    """"byte", or a JSON file of the tokenizers library"""
    eos: str | None = field(None, EOS_HELP)
    bos: str | None = field(None, BOS_HELP)
    document: Literal["file", "line", "blank_line"] = "file"
    """unit of a document in .txt and .md files"""
    text_field: str = "text"
    """key of the text in records"""
    validation_every: int = 0
    """every N-th document is of the split validation (default: as folders train/ and validation/ say)"""
    ignore_keys: list[str] = field(list, IGNORED)
    strict: bool = field(False, STRICT)
    cache: str | None = None
    """folder of the tokens (default: $FORGE_CACHE/tokens, below ~/.cache/forge)"""

    def __post_init__(self) -> None:
        raise_problems("text", _text_problems(self))


def foreign_tables(config: Any) -> Iterator[Problem]:
    """Problems of keys off their defaults in the table of another kind than `config.name`."""
    for kind in TABLES:
        own = getattr(config, kind)
        for key, value in vars(own).items():
            if config.name != kind and value != getattr(type(own)(), key):
                rule = f"is a key of name {kind!r}, and name is {config.name!r}"
                fix = f'remove it, or use name = "{kind}"'
                yield Problem(f"{kind}.{key}", "foreign", value, rule, fix)


def kind_problems(config: Any) -> Iterator[Problem]:
    """Problems of a source whose tokens are in a cache, without those of its table."""
    name, table = config.name, config.huggingface
    if not config.path:
        kinds = {"huggingface": "a folder or a name of the hub", "chat": "conversations"}
        rule = f"must name {kinds.get(name, 'text files')} when name is {name!r}"
        yield Problem("path", "missing", config.path, rule, "set path")
    if config.dtype is not None:
        rule = f"must not be given when name is {name!r}, whose tokens have the type that fits"
        yield Problem("dtype", "excludes", config.dtype, rule, "remove dtype")
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
    yield from special_problems(config.tokenizer, config.eos, config.bos)
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
        if type(value) is not int or not 1 <= value <= most:
            yield Problem(key, "range", value, f"must be an integer from 1 to {most}", "use 256")
        elif not config.streaming and value != getattr(HuggingFaceConfig, key):
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
    if config.document not in DOCUMENTS:
        rule = f"must be one of {', '.join(DOCUMENTS)}"
        yield Problem("document", "unknown", config.document, rule, "use file")
    yield from every_problems(config.validation_every)
