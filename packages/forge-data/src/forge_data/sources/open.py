"""Open sources and streams by the name in a config."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from itertools import zip_longest
from typing import Any

from forge_data._shared.problems import invalid
from forge_data.config import SOURCES_GROUP, DataConfig, SourceConfig
from forge_data.kinds import RAW_KINDS
from forge_data.mixed_stream import MixedStream, seed_of
from forge_data.mixture import Phase
from forge_data.packing import PackedStream
from forge_data.packing_config import PackingConfig
from forge_data.phased_stream import PhasedStream
from forge_data.phases import PhaseSegment, phase_segments
from forge_data.places import num_shards_of
from forge_data.protocols import Stream, Tokenizer
from forge_data.sources.builtin import BuiltinCorpus
from forge_data.stored_plan import open_plan
from forge_data.tokenizer import load_tokenizer
from forge_data.tokens.files import TokenFiles
from forge_data.tokens.raw import IdShards
from forge_data.tokens.raw_formats import open_megatron, open_nanogpt, open_npy

#: Kinds of text, those of `CACHED`: their modules are imported when a config names them, as some need an extra. A module
#: defines `open_source(config)` and `open_header(config)`, which reads no text; it may define `check_source(config)`, which
#: raises what `open_source` finds before it tokenizes.
_MODULES = {
    "chat": "forge_data.chat.source",
    "huggingface": "forge_data.sources.huggingface",
    "text": "forge_data.sources.text",
}
_REQUIRED = ("vocab_size", "tokenizer", "max_token_id", "fingerprint")
_REQUIRED_FOR_PACKING = ("num_tokens", "num_documents", "documents", "read")


def open_source(config: SourceConfig) -> Any:
    """The source of a config: a `Source`, or one that makes its own stream.

    An entry point of `forge.sources` or an import path is called as `source(config, **config.options)`; built-in
    names come first. A factory with an option `streaming` makes, where it is true, a stream without length, which
    needs a weight in a mixture and has no `max_epochs`.
    The source may have `stream(seq_len, seed)`, a `Stream` of rows without packing (see `open_stream`),
    instead of `num_tokens`, `num_documents`, `documents` and `read`.

    Opening token files reads sizes, sidecar and document offsets, and tokens according to `verify`. Text and sets of
    Hugging Face are tokenized into a cache first, which can take long (`open_header` does not).
    Raises InvalidData for missing or damaged files, ValueError for a name that cannot be imported or that two distributions
    have, and for options that the source does not take.
    Usage: `open_source(SourceConfig(name="tokens", path="tokens/books"))`.
    """
    if config.name == "builtin":
        return BuiltinCorpus(config.split)
    if config.name == "tokens":
        assert config.path is not None  # SourceConfig raises for token files without one
        return TokenFiles(config.path, config.dtype, config.split, config.verify)
    if config.name in _MODULES:
        return importlib.import_module(_MODULES[config.name]).open_source(config)
    if config.name in RAW_KINDS:
        return _open_raw(config)

    factory = _load_factory(config.name)
    try:
        inspect.signature(factory).bind(config, **config.options)
    except TypeError as error:
        rule = f"must be arguments of {config.name}(config, **options): {error}"
        raise invalid("options", "signature", config.options, rule, "correct them") from error

    source = factory(config, **config.options)
    wanted = _REQUIRED if hasattr(source, "stream") else (*_REQUIRED, *_REQUIRED_FOR_PACKING)
    # on the type first: a property may read all files
    missing = [n for n in wanted if not hasattr(type(source), n) and not hasattr(source, n)]
    if missing:
        rule = f"must define {', '.join(wanted)}, but lacks {', '.join(missing)}"
        raise invalid("name", "incomplete", config.name, rule, "add them")
    return source


def open_header(config: SourceConfig, *, check: bool = False) -> Any:
    """What `open_source` gives, or of a source that it would tokenize only `vocab_size`, `tokenizer`, a bound as
    `max_token_id`, and `num_tokens` where the cache has it: nothing is tokenized. A source of your own is opened in full. Raises as
    `open_source`.

    `check` also raises what `open_source` finds before it tokenizes, as a set may lack a split or its column; it loads
    the set. Usage: `open_header(SourceConfig("text", "books")).vocab_size`.
    """
    if config.name not in _MODULES:
        return open_source(config)
    module = importlib.import_module(_MODULES[config.name])
    header = module.open_header(config)
    if check and hasattr(module, "check_source"):
        module.check_source(config)
    return header


def tokenizer_of(config: SourceConfig) -> Tokenizer:
    """The tokenizer that made the tokens of a source. Raises ValueError for one without a tokenizer."""
    spec = open_header(config).tokenizer
    if spec is None:
        rule, fix = "has no tokenizer", "prepare it with forge-data"
        raise invalid("source", "tokenizer", config.path, rule, fix)
    return load_tokenizer(spec)


def training_tokenizer(configs: Iterable[SourceConfig]) -> Tokenizer:
    """The tokenizer of the first source. Raises as `tokenizer_of`.

    Its `end_ids` are also those of the answers of other sources with the same tokenizer.
    """
    first, *others = configs
    tokenizer = tokenizer_of(first)
    for config in others:
        if config.name == "chat":
            from forge_data.chat.template import ChatTemplate

            other = load_tokenizer(ChatTemplate(config.chat).spec())
            if other.fingerprint == tokenizer.fingerprint:
                tokenizer.end_ids = tuple(dict.fromkeys((*tokenizer.end_ids, *other.end_ids)))
    return tokenizer


def _open_raw(config: SourceConfig) -> IdShards:
    """A source in a format of another project."""
    assert config.path is not None
    if config.name == "megatron":
        return open_megatron(config.path, config.split)
    if config.name == "npy":
        return open_npy(config.path, config.split, **vars(config.npy))
    return open_nanogpt(config.path, config.split, config.dtype, **vars(config.nanogpt))


def open_stream(
    config: SourceConfig, seq_len: int, seed: int = 0, packing: PackingConfig | None = None
) -> Stream:
    """Rows of `seq_len` tokens of a source, shuffled by `seed`: packed, by default concatenated, or from the source's
    own `stream(seq_len, seed)`, which can give weights, extras and positions of three axes (see `Stream`).

    Usage: `loader = Loader(open_stream(SourceConfig(), 256), global_batch=16)`. Raises as `open_source`.
    """
    source = open_source(config)
    own = getattr(source, "stream", None)
    if own is not None:
        made: Stream = own(seq_len, seed)
        return made
    if packing is None or packing.name == "concatenate":
        return PackedStream(source, seq_len, seed)
    return PackedStream(source, seq_len, seed, plan=open_plan(source, seq_len, packing))


def open_training(config: DataConfig, seed: int = 0) -> Stream:
    """The stream that training reads: that of the only source, or a mixture. Raises as `open_source`, and ValueError
    for weights that cannot be fractions.

    In a mixture each source has an order of its own (`seed_of`), whatever the others are. Usage:
    `Loader(open_training(DataConfig(sources={"a": TrainingSourceConfig()})), global_batch=16)`.
    """
    parts: list[list[PhaseSegment]] = []
    for segment in phase_segments(config):
        if parts and segment.seq_len == parts[-1][-1].seq_len:
            parts[-1].append(segment)
        else:
            parts.append([segment])

    streams, begun = [], dict.fromkeys(config.sources, 0)
    for part, following in zip_longest(parts, parts[1:]):
        stream = _open_part(config, part, seed, begun)
        streams.append(stream)
        if following is not None and isinstance(stream, MixedStream):
            for name, epochs in stream.epochs_begun(following[0].start - part[0].start).items():
                begun[name] += epochs

    if len(streams) == 1:
        return streams[0]
    if any(num_shards_of(stream) for stream in streams):
        name, _, _, seq_len, *_ = parts[1][0]
        rule = (
            f"must be seq_len {config.seq_len} with a source that streams, which cannot start over"
        )
        fix = "leave it out, or use streaming = false"
        raise invalid(f"phases.{name}.seq_len", "mismatch", seq_len, rule, fix)
    return PhasedStream([(p[0].name, stream, p[0].start) for p, stream in zip(parts, streams)])


def _open_part(
    config: DataConfig, part: Sequence[PhaseSegment], seed: int, begun: Mapping[str, int]
) -> Stream:
    """Open the rows of one length. Later parts shuffle with their own seeds, so their sources begin a new epoch. `begun` are those of each source before, of which the last may be unfinished: its documents come again."""
    sources, seq_len = config.sources, part[0].seq_len
    if part[0].name:
        seed = seed_of(seed, f"phase {part[0].name}")

    mixed = len(sources) > 1 or any(source.max_epochs for source in sources.values())
    if not mixed:
        (source,) = sources.values()
        alone = open_stream(source, seq_len, seed, config.packing)
        _check_packed([alone], config.packing)
        return alone

    streams = {
        name: open_stream(
            source, seq_len, seed_of(seed, name) if len(sources) > 1 else seed, config.packing
        )
        for name, source in sources.items()
    }
    _check_packed(streams.values(), config.packing)

    epochs = {
        name: max(0, source.max_epochs - begun[name])
        for name, source in sources.items()
        if source.max_epochs
    }
    return MixedStream(streams, _phases(config, part, streams), epochs)


def _check_packed(streams: Iterable[Stream], packing: PackingConfig) -> None:
    """ValueError for a packing that no stream has."""
    if packing.name != "concatenate" and not any(isinstance(s, PackedStream) for s in streams):
        rule = "must not be given for sources that make their own rows"
        raise invalid("packing.name", "excludes", packing.name, rule, "remove it")


def _phases(
    config: DataConfig, part: Sequence[PhaseSegment], streams: Mapping[str, Stream]
) -> list[Phase]:
    """Weights from the start of a part on, and from each phase in it that has others."""
    sources = config.sources
    given = [
        float(len(streams[name]) if source.weight is None else source.weight)
        for name, source in sources.items()
    ]
    # A power that underflows raises an error of a weight that is too small; as 0 it would drop the source.
    least = sys.float_info.min
    own = tuple(w and max(least, (w / max(given)) ** (1.0 / config.temperature)) for w in given)
    phases: list[Phase] = []
    for segment in part:
        wanted = segment.weights
        weights = own if wanted is None else tuple(wanted.get(name, 0.0) for name in sources)
        if not phases or weights != phases[-1].weights:
            name = segment.name if wanted is not None else ""
            phases.append(Phase(segment.start - part[0].start, weights, name))
    return phases


def _load_factory(name: str) -> Any:
    """The callable of a name in `forge.sources`, or of `module:attr`."""
    found = [EntryPoint(name, name, SOURCES_GROUP)] if ":" in name else [*entry_points(group=SOURCES_GROUP, name=name)]  # fmt: skip
    if len({entry.value for entry in found}) != 1:
        owners = ", ".join(entry.dist.name for entry in found if entry.dist is not None)
        rule = f"must belong to a single distribution in {SOURCES_GROUP}, not to {owners}"
        raise invalid("name", "duplicate", name, rule, 'name it as "module:attr"')
    try:
        return found[0].load()
    except (ImportError, AttributeError) as error:
        rule = f"must be importable ({error})"
        fix = "check the spelling and that the module is on the Python path"
        raise invalid("name", "not_importable", name, rule, fix) from error
