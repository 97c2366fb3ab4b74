"""The data section of a job: sources, sequence length, workers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from importlib.metadata import entry_points
from typing import Any, Literal

from forge_data._shared.fields import field
from forge_data._shared.problems import Problem, raise_problems
from forge_data.kinds import (
    TABLES,
    BorderConfig,
    ChatConfig,
    HuggingFaceConfig,
    TextConfig,
    choice_problems,
    foreign_tables,
    integer_problem,
    is_int,
    is_weight,
    kind_problems,
    path_problems,
    streaming_problems,
)
from forge_data.packing_config import PackingConfig
from forge_data.phases import PhaseConfig, phase_problems

DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")
BUILT_IN = ("builtin", "tokens", "megatron", *TABLES)
SOURCES_GROUP = "forge.sources"
SPLITS = ("train", "validation")
VERIFY = ("touch", "full", "off")
# Bounds far above realistic values, and far below those that exhaust a machine.
MAX_SEQ_LEN = 1 << 24
MAX_WORKERS = 256  # of one rank; more is a typing error
MAX_PREFETCH = 1024  # steps, each of which holds a batch in memory
MAX_GLOBAL_BATCH = 1 << 20
MAX_TOKENS_AT_ONCE = 1 << 28  # of the rows of one rank, 8 GiB as arrays
_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True)
class SourceConfig:
    """One source of tokens. Raises ValueError with one line per broken rule.

    Usage: `SourceConfig(name="tokens", path="tokens/books")`.
    """

    name: str = "builtin"
    """where tokens come from: "builtin", "tokens", "text", "huggingface", "chat", "megatron", "nanogpt", "npy", an
    entry point of forge.sources, or an import path "module:attr" """
    path: str | None = None
    """tokens: folder written by `forge-data prepare`, or one raw file of token ids; text: a file or a folder;
    huggingface: a folder or a name of the hub; chat: a .jsonl (.gz, .zst) or .parquet file, a folder of them, or a
    saved set; megatron, nanogpt, npy: a file or a folder"""
    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] | None = None
    """type of the ids in a raw token file; a file with a sidecar knows it"""
    split: Literal["train", "validation"] = "train"
    """which part of the source is read"""
    verify: Literal["touch", "full", "off"] = "touch"
    """when tokens are compared with their digests: a block when first read, all when opened, never"""
    chat: ChatConfig = field(ChatConfig)
    """how conversations of name chat become rows"""

    options: dict[str, Any] = field(dict)
    """arguments of a source of your own, by name; built-in ones take none"""
    huggingface: HuggingFaceConfig = field(HuggingFaceConfig)
    """a set of the datasets library"""
    text: TextConfig = field(TextConfig)
    """text that is tokenized when a run begins"""
    nanogpt: BorderConfig = field(BorderConfig)
    """documents of .bin files without an index"""
    npy: BorderConfig = field(BorderConfig)
    """documents of .npy files"""

    def __post_init__(self) -> None:
        raise_problems("source", _source_problems(self))

    def as_source(self) -> SourceConfig:
        """The same data, without the fields that a subclass adds."""
        return SourceConfig(**{f.name: getattr(self, f.name) for f in fields(SourceConfig)})


@dataclass(frozen=True)
class TrainingSourceConfig(SourceConfig):
    """A source that training reads, alone or in a mixture."""

    weight: float | None = None
    """its share of the training instances, relative to the others' (default: its rows; see temperature)"""
    max_epochs: int | None = None
    """times that its rows come at most in training, where a phase with another seq_len begins a new time; then the
    others take its share (default: no end)"""

    def __post_init__(self) -> None:
        raise_problems("source", [*_source_problems(self), *_share_problems(self)])


@dataclass(frozen=True)
class DataConfig:
    """The data section of a job. Raises ValueError with one line per broken rule.

    Usage: `DataConfig(seq_len=256, sources={"python_docs": SourceConfig()})`.
    """

    seq_len: int = 256
    """tokens in a row; labels are the same tokens, one later"""
    seed: int | None = None
    """seed of the order of training rows (default: that of the run)"""
    num_workers: int = 0
    """processes that read ahead; 0 reads in the training process"""
    prefetch: int | None = None
    """steps that are read ahead, by the workers (default: 2 each), or without workers by a thread (default: 0)"""
    worker_timeout_seconds: float = 600.0
    """seconds after which a worker that gives nothing is replaced as one that died; 0 waits for ever"""
    worker_restarts: int = 3
    """workers that died or hung and are replaced, in one life of a run; the next one ends it"""
    sources: dict[str, TrainingSourceConfig] = field(dict)
    """training text by name, mixed if there are several"""
    accept_change: bool = False
    """go on at the same row of other data than the checkpoint's, and record what changed; best as a flag of one
    start"""
    temperature: float = field(1.0, range="a finite number above 0")
    """weights of sources become weight ** (1 / temperature): above 1 they come nearer to one another"""
    phases: dict[str, PhaseConfig] = field(dict)
    """points from which rows, batches, weights or rates are others, by name"""
    packing: PackingConfig = field(PackingConfig)
    """how documents are put into rows, in training and validation"""
    validation: SourceConfig | None = None
    """held-out text that the validation loss is measured on"""

    def __post_init__(self) -> None:
        raise_problems("data", _data_problems(self))


def _source_problems(c: SourceConfig) -> Iterator[Problem]:
    name = str(c.name)
    known = c.name in BUILT_IN or _IMPORT_PATH.fullmatch(name)
    if not known and not entry_points(group=SOURCES_GROUP, name=name):
        rule = f'must be one of {", ".join(BUILT_IN)}, an entry point of {SOURCES_GROUP} or an import path "module:attr"'
        fix = 'use name = "tokens" with a path to token files, or name = "builtin"'
        yield Problem("name", "unknown", c.name, rule, fix)

    yield from path_problems(c.path or "")

    if c.name in BUILT_IN and c.options:
        rule = f"must be empty when name is {c.name!r}, which is built in"
        fix = "use the keys of the source itself, or name a source of your own"
        yield Problem("options", "excludes", c.options, rule, fix)

    yield from kind_problems(c)
    yield from foreign_tables(c)
    yield from choice_problems(c)


def _share_problems(c: TrainingSourceConfig) -> Iterator[Problem]:
    if c.weight is not None and not is_weight(c.weight):
        rule = "must be a finite number of at least 0"
        yield Problem("weight", "range", c.weight, rule, "use 1.0")
    if c.max_epochs is not None:
        yield from integer_problem("max_epochs", c.max_epochs, 1, 1 << 20, "use 4")


def _mixture_problems(c: DataConfig) -> Iterator[Problem]:
    """Problems of weights and phases, which depend on all sources together."""
    weighted = [name for name, source in c.sources.items() if source.weight is not None]
    only, add = "must not be given for the only source", "remove it, or add a source"
    if len(c.sources) == 1 and weighted:
        (name, source), *_ = c.sources.items()
        yield Problem(f"sources.{name}.weight", "only_source", source.weight, only, add)
    elif weighted and len(weighted) < len(c.sources):
        missing = next(name for name in c.sources if name not in weighted)
        rule, fix = f"must be given, as {weighted[0]} has one", "give all of them one, or none"
        yield Problem(f"sources.{missing}.weight", "missing", ..., rule, fix)

    elif weighted and not any(c.sources[name].weight for name in weighted):
        rule = f"({', '.join(c.sources)}) must have one with a weight above 0"
        yield Problem("sources", "zero_weights", ..., rule, "raise one")

    if not (is_weight(c.temperature) and c.temperature > 0):
        rule = "must be a finite number above 0"
        yield Problem("temperature", "range", c.temperature, rule, "use 1.0")
    elif len(c.sources) == 1 and c.temperature != 1.0:
        yield Problem("temperature", "only_source", c.temperature, only, add)
    yield from phase_problems(c)


def prefetch_problems(prefetch: int | None, num_workers: int) -> Iterator[Problem]:
    """Problems of the number of steps that are read ahead."""
    if prefetch is None:
        return
    yield from integer_problem("prefetch", prefetch, 0, MAX_PREFETCH, "use 2")
    if is_int(prefetch, 0, num_workers - 1):
        rule = f"must be at least num_workers {num_workers}, or workers have nothing to read"
        yield Problem("prefetch", "below_workers", prefetch, rule, f"use {2 * num_workers}")


def _data_problems(c: DataConfig) -> Iterator[Problem]:
    for name, least, most, fix in (
        ("seq_len", 1, MAX_SEQ_LEN, "use seq_len = 256"),
        ("num_workers", 0, MAX_WORKERS, "use num_workers = 0 to read in the training process"),
        ("worker_restarts", 0, 1 << 20, "use 3"),
    ):
        yield from integer_problem(name, getattr(c, name), least, most, fix)

    workers = c.num_workers if is_int(c.num_workers, 0, MAX_WORKERS) else 0
    yield from prefetch_problems(c.prefetch, workers)
    if not is_weight(c.worker_timeout_seconds):
        rule = "must be a finite number of at least 0"
        yield Problem(
            "worker_timeout_seconds", "range", c.worker_timeout_seconds, rule, "use 600.0"
        )

    if c.seed is not None:
        yield from integer_problem("seed", c.seed, 0, 2**63 - 1, "use 0")

    tables = {"sources": c.sources, "phases": c.phases}
    wrong = {name: value for name, value in tables.items() if not isinstance(value, dict)}
    for name, value in wrong.items():
        yield Problem(
            name, "table", value, "must be a table of tables", f"write [data.{name}.NAME]"
        )
    if wrong:
        return

    if not c.sources:
        fix = 'add [data.sources.python_docs] with name = "builtin", or name = "tokens" and a path'
        yield Problem("sources", "missing", c.sources, "must have one entry or more", fix)
    else:
        yield from _mixture_problems(c)
    yield from streaming_problems(c.sources, c.validation, c.phases, c.seq_len)
