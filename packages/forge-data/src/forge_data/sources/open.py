"""Sources and streams are opened by the name in a config."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from forge_data.config import SOURCES_GROUP, DataConfig, SourceConfig
from forge_data.mixed_stream import MixedStream, seed_of
from forge_data.mixture import Phase
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


def open_training(config: DataConfig, seed: int = 0) -> Stream:
    """The stream that training reads: that of the only source, or a mixture. Raises as `open_source`, and ValueError
    for weights that are no shares.

    In a mixture each source has an order of its own (`seed_of`), whatever the others are. Usage:
    `Loader(open_training(DataConfig(sources={"a": TrainingSourceConfig()})), global_batch=16)`.
    """
    sources = config.sources
    mixed = len(sources) > 1 or any(source.max_epochs for source in sources.values())
    if not mixed:
        (source,) = sources.values()
        return open_stream(source, config.seq_len, seed)
    streams = {
        name: open_stream(source, config.seq_len, seed_of(seed, name) if len(sources) > 1 else seed)
        for name, source in sources.items()
    }
    epochs = {name: source.max_epochs for name, source in sources.items() if source.max_epochs}
    return MixedStream(streams, _phases(config, streams), epochs)


def _phases(config: DataConfig, streams: Mapping[str, Stream]) -> list[Phase]:
    """Weights from the start on, and from each phase that has some."""
    sources = config.sources
    given = [
        float(len(streams[name]) if source.weight is None else source.weight)
        for name, source in sources.items()
    ]
    phases = [Phase(0, tuple((w / max(given)) ** (1.0 / config.temperature) for w in given))]
    for phase in sorted(config.phases.values(), key=lambda phase: phase.start_tokens):
        if phase.weights:
            start = -(-phase.start_tokens // config.seq_len)
            phases.append(Phase(start, tuple(phase.weights.get(name, 0.0) for name in sources)))
    return phases


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
