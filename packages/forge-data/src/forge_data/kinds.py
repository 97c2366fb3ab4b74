"""Tables of options that one kind of source alone reads: `[data.sources.X.text]` belongs to `name = "text"`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from forge_data._problems import byte_eos_problem, every_problem, path_problems, raise_problems
from forge_data.chat.config import ChatConfig

__all__ = ["CACHED", "ChatConfig", "HuggingFaceConfig", "TextConfig", "is_streamed"]

#: Kinds with a table of their own, which is a field of SourceConfig by the same name.
TABLES = ("huggingface", "text", "chat", "nanogpt", "npy")
#: Kinds whose tokens are in a cache, from which they are read like token files.
CACHED = ("huggingface", "text", "chat")
DOCUMENTS = ("file", "line", "blank_line")


def _field(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class HuggingFaceConfig:
    """How a set of the `datasets` library is read: `HuggingFaceConfig(split="test", text_field="content")`."""

    config_name: str | None = _field(None, "configuration of a set that has several")
    split: str | None = _field(
        None, "split as the set calls it, or a slice of one (default: that of the source)"
    )
    text_field: str = _field("text", "column of the text")
    tokenizer: str = _field("byte", '"byte", or a JSON file of the tokenizers library')
    eos: str | None = _field(
        None, "token that ends a document (default: the first of the usual names)"
    )
    cache: str | None = _field(
        None, "folder of the tokens (default: $FORGE_CACHE, or ~/.cache/forge/tokens)"
    )
    streaming: bool = _field(
        False, "read and tokenize while training, front to back, without a cache; for training only"
    )
    virtual_shards: int = _field(
        256, "streaming: parts that are read side by side, at most as many as row groups or files"
    )
    shuffle_window: int = _field(
        256, "streaming: documents of a shard that are shuffled and packed together"
    )

    def __post_init__(self) -> None:
        raise_problems("huggingface", _hugging_face_problems(self))


@dataclass(frozen=True)
class TextConfig:
    """How text is cut into documents and tokenized: `TextConfig(document="line", validation_every=20)`."""

    tokenizer: str = _field("byte", '"byte", or a JSON file of the tokenizers library')
    eos: str | None = _field(
        None, "token that ends a document (default: the first of the usual names)"
    )
    document: Literal["file", "line", "blank_line"] = _field(
        "file", "unit of a document in .txt and .md files"
    )
    text_field: str = _field("text", "key of the text in records")
    validation_every: int = _field(
        0,
        "every N-th document is of the split validation (default: as folders train/ and validation/ say)",
    )
    cache: str | None = _field(
        None, "folder of the tokens (default: $FORGE_CACHE, or ~/.cache/forge/tokens)"
    )

    def __post_init__(self) -> None:
        raise_problems("text", _text_problems(self))


def foreign_tables(config: Any) -> Iterator[str]:
    """Sentences for keys off their defaults in the table of another kind than `config.name`."""
    for kind in TABLES:
        own = getattr(config, kind)
        for key, value in vars(own).items():
            if config.name != kind and value != getattr(type(own), key):
                yield (
                    f"{kind}.{key} {value!r} is a key of name {kind!r}, and name is {config.name!r}; remove it, or "
                    f'use name = "{kind}"'
                )


def kind_problems(config: Any) -> Iterator[str]:
    """Problems of a source whose tokens are in a cache, beside those of its table."""
    if not config.path:
        what = {"huggingface": "a folder or a name of the hub", "chat": "conversations"}.get(
            config.name, "text files"
        )
        yield f"path {config.path!r} must name {what} when name is {config.name!r}; set path"
    if config.dtype is not None:
        yield (
            f"dtype {config.dtype!r} means nothing when name is {config.name!r}, whose tokens have the type that fits; "
            "remove dtype"
        )
    if config.name == "huggingface" and config.huggingface.streaming and config.verify != "touch":
        yield f"verify {config.verify!r} means nothing when streaming, which has no digests; remove it"
    own = config.huggingface.split
    if config.name == "huggingface" and own is not None and config.split != "train":
        yield (
            f"split {config.split!r} means nothing beside huggingface.split {own!r}; remove one of them"
        )


def streaming_problems(
    sources: Mapping[str, Any], validation: Any, phases: Mapping[str, Any], seq_len: int
) -> Iterator[str]:
    """What a source that is streamed cannot do, as nobody knows how many rows it has."""
    for name, source in sources.items():
        if not is_streamed(source):
            continue
        if source.max_epochs is not None:
            yield (
                f"sources.{name}.max_epochs {source.max_epochs} must not be given for a streaming source, whose shards end "
                "one by one; remove it, or tokenize the set with streaming = false"
            )
        if len(sources) > 1 and source.weight is None:
            yield (
                f"sources.{name}.weight must be given for a streaming source, whose rows nobody has counted; give all "
                "sources one"
            )
        for phase, table in phases.items():
            if table.seq_len not in (None, seq_len):
                yield (
                    f"phases.{phase}.seq_len {table.seq_len} must be seq_len {seq_len}, as sources.{name} streams and cannot "
                    "begin anew; leave it out, or set streaming = false"
                )
    if validation is not None and is_streamed(validation):
        yield "validation must not be streaming, as it takes the same rows each time; set streaming = false there"


def is_streamed(source: Any) -> bool:
    """Whether a SourceConfig reads a set of `datasets` while a run goes on, or has `streaming` among the options of its own
    factory. Usage: `is_streamed(config.sources["web"])`."""
    own = source.name == "huggingface" and source.huggingface.streaming
    return bool(own or source.options.get("streaming"))


def _tokenizer_problems(config: Any) -> Iterator[str]:
    if not config.tokenizer:
        yield 'tokenizer \'\' must be "byte" or the path of a JSON file; use "byte"'
    if config.tokenizer == "byte":
        yield from byte_eos_problem(config.eos)
    if not config.text_field:
        yield "text_field '' must name a column; use \"text\""
    for key in ("tokenizer", "cache"):
        for problem in path_problems(getattr(config, key) or ""):
            yield problem.replace("path", key, 1)
    if config.cache == "":
        yield "cache '' must name a folder; remove it for the usual one"


def _hugging_face_problems(config: HuggingFaceConfig) -> Iterator[str]:
    yield from _tokenizer_problems(config)
    if config.split == "":
        yield "split '' must name a split of the set; remove it for that of the source"
    for key, most in (("virtual_shards", 1 << 16), ("shuffle_window", 1 << 24)):
        value = getattr(config, key)
        if type(value) is not int or not 1 <= value <= most:
            yield f"{key} {value!r:.40} must be a whole number from 1 to {most}; use 256"
        elif not config.streaming and value != getattr(HuggingFaceConfig, key):
            yield f"{key} {value} means nothing without streaming; remove it, or set streaming = true"
    if config.streaming and config.cache is not None:
        yield f"cache {config.cache!r} means nothing when streaming, which writes none; remove it"
    if config.streaming and "[" in (config.split or ""):
        yield f"split {config.split!r} must be a whole split when streaming; name one, or do not stream"


def _text_problems(config: TextConfig) -> Iterator[str]:
    yield from _tokenizer_problems(config)
    if config.document not in DOCUMENTS:
        yield f"document {config.document!r} must be one of {', '.join(DOCUMENTS)}; use file"
    yield from every_problem(config.validation_every)
