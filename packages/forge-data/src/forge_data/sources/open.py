"""Sources and streams are opened by the name in a config."""

from __future__ import annotations

import importlib
import inspect
from importlib.metadata import entry_points
from typing import Any

from forge_data.config import SOURCES_GROUP, SourceConfig
from forge_data.packing import PackedStream
from forge_data.protocols import Stream
from forge_data.sources.builtin import BuiltinCorpus
from forge_data.sources.token_files import TokenFiles

_REQUIRED = ("vocab_size", "tokenizer", "max_token_id", "fingerprint")
_REQUIRED_FOR_PACKING = ("num_tokens", "num_documents", "documents", "read")


def open_source(config: SourceConfig) -> Any:
    """The source of a config: a `Source`, or one that makes its own stream.

    An entry point of `forge.sources` or an import path is called as `source(config, **config.options)`.
    The source may have `stream(seq_len, seed)`, a `Stream` of rows without packing (see `open_stream`),
    instead of `num_tokens`, `num_documents`, `documents` and `read`.

    Opening token files reads sizes, sidecar and document offsets, and tokens according to `verify`.
    Raises InvalidData for missing or damaged files, ValueError for a name that cannot be imported and for
    options that the source does not take.
    Usage: `open_source(SourceConfig(name="tokens", path="tokens/books"))`.
    """
    if config.name == "builtin":
        return BuiltinCorpus(config.split)
    if config.name == "tokens":
        assert config.path is not None  # a rule of SourceConfig
        return TokenFiles(config.path, config.dtype, config.split, config.verify)
    factory = _load_factory(config.name)
    try:
        inspect.signature(factory).bind(config, **config.options)
    except TypeError as error:
        raise ValueError(
            f"options {config.options} must be arguments of {config.name}(config, **options): {error}; correct "
            "them"
        ) from error
    source = factory(config, **config.options)
    wanted = _REQUIRED if hasattr(source, "stream") else (*_REQUIRED, *_REQUIRED_FOR_PACKING)
    missing = [name for name in wanted if not hasattr(source, name)]
    if missing:
        raise ValueError(
            f"source {config.name!r} must offer {', '.join(wanted)}, but lacks {', '.join(missing)}; add them"
        )
    return source


def open_stream(config: SourceConfig, seq_len: int, seed: int = 0) -> Stream:
    """Rows of `seq_len` tokens of a source, shuffled by `seed`: packed, or from the source's own
    `stream(seq_len, seed)`, which can give weights, extras and positions of three axes (see `Stream`).

    Usage: `loader = Loader(open_stream(SourceConfig(), 256), global_batch=16)`. Raises as `open_source`.
    """
    source = open_source(config)
    own = getattr(source, "stream", None)
    stream: Stream = PackedStream(source, seq_len, seed) if own is None else own(seq_len, seed)
    return stream


def _load_factory(name: str) -> Any:
    """The callable of an entry point of `forge.sources`, or of `module:attr`."""
    module, colon, attribute = name.partition(":")
    if not colon:
        (entry,) = (e for e in entry_points(group=SOURCES_GROUP) if e.name == name)
        return entry.load()
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"source name {name!r} must be importable ({error}); "
            "check the spelling and that the module is on the Python path"
        ) from error
    return found
