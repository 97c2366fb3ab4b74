"""The data section of a job: sources, sequence length, workers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, Literal

from forge_data._problems import path_problems, raise_problems

DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")
BUILT_IN = ("builtin", "tokens")
SOURCES_GROUP = "forge.sources"
SPLITS = ("train", "validation")
VERIFY = ("touch", "full", "off")
# Bounds far above realistic values, and far below those that exhaust a machine.
MAX_SEQ_LEN = 1 << 24
MAX_WORKERS = 256  # of one rank
MAX_GLOBAL_BATCH = 1 << 20
MAX_TOKENS_AT_ONCE = 1 << 28  # of the rows of one rank, 8 GiB as arrays
_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def _field(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


def _is_int(value: Any, minimum: int, maximum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= maximum


@dataclass(frozen=True)
class SourceConfig:
    """One source of tokens. Raises ValueError with one line per broken rule.

    Usage: `SourceConfig(name="tokens", path="tokens/books")`.
    """

    name: str = _field(
        "builtin",
        'where tokens come from: "builtin", "tokens", an entry point of forge.sources, or an import path '
        '"module:attr"',
    )
    path: str | None = _field(
        None, "folder written by `forge-data prepare`, or one raw file of token ids"
    )
    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] | None = _field(
        None, "type of the ids in a raw token file; a file with a sidecar knows it"
    )
    split: Literal["train", "validation"] = _field("train", "which part of the source is read")
    verify: Literal["touch", "full", "off"] = _field(
        "touch",
        "when tokens are compared with their digests: a block when first read, all when opened, never",
    )

    options: dict[str, Any] = field(
        default_factory=dict,
        metadata={"help": "arguments of a source of your own, by name; built-in ones take none"},
    )

    def __post_init__(self) -> None:
        raise_problems("source", _source_problems(self))


@dataclass(frozen=True)
class TrainingSourceConfig(SourceConfig):
    """A source that training reads, alone or in a mixture."""

    weight: float | None = _field(
        None,
        "its share of the training instances, relative to the others' (default: its rows; see temperature)",
    )
    max_epochs: int | None = _field(
        None,
        "times that its rows come at most in training; then the others take its share (default: no end)",
    )

    def __post_init__(self) -> None:
        raise_problems("source", [*_source_problems(self), *_share_problems(self)])


@dataclass(frozen=True)
class PhaseConfig:
    """Other shares of the sources, and another learning rate, from some point of a run on."""

    start_tokens: int = field(
        metadata={
            "help": "tokens of the run before it, rounded up to whole rows and, for the rate, steps"
        }
    )
    weights: dict[str, float] = field(
        default_factory=dict,
        metadata={
            "help": "source = its weight; one that is not named gives nothing (default: as before)"
        },
    )
    lr_multiplier: float = _field(
        1.0, "factor of the learning rate, in place of that of the phase before"
    )

    def __post_init__(self) -> None:
        raise_problems("phase", _phase_problems(self))


@dataclass(frozen=True)
class DataConfig:
    """The data section of a job. Raises ValueError with one line per broken rule.

    Usage: `DataConfig(seq_len=256, sources={"python_docs": SourceConfig()})`.
    """

    seq_len: int = _field(256, "tokens in a row; labels are the same tokens, one later")
    seed: int | None = _field(None, "seed of the order of training rows (default: that of the run)")
    num_workers: int = _field(0, "processes that read ahead; 0 reads in the training process")
    sources: dict[str, TrainingSourceConfig] = field(
        default_factory=dict, metadata={"help": "training text by name, mixed if there are several"}
    )
    temperature: float = _field(
        1.0,
        "weights of sources become weight ** (1 / temperature): above 1 they come nearer to one another",
    )
    phases: dict[str, PhaseConfig] = field(
        default_factory=dict,
        metadata={"help": "points from which sources have other weights, by name"},
    )
    validation: SourceConfig | None = field(
        default=None, metadata={"help": "held-out text that the validation loss is measured on"}
    )

    def __post_init__(self) -> None:
        raise_problems("data", _data_problems(self))

    def lr_multiplier(self, tokens: int) -> float:
        """Factor of the learning rate of a step before which the run has seen so many tokens."""
        begun = [phase for phase in self.phases.values() if phase.start_tokens <= tokens]
        return max(begun, key=lambda p: p.start_tokens).lr_multiplier if begun else 1.0


def _source_problems(c: SourceConfig) -> Iterator[str]:
    if not _is_known(str(c.name)):
        yield (
            f'name {c.name!r} must be "builtin", "tokens", an entry point of {SOURCES_GROUP} or an import path '
            '"module:attr"; use name = "tokens" with a path to token files, or name = "builtin"'
        )
    if c.name == "tokens" and not c.path:
        yield (
            f"path {c.path!r} must name token files when name is {c.name!r}; set path to a folder written by "
            "`forge-data prepare`"
        )
    yield from path_problems(c.path or "")
    if c.name in BUILT_IN and c.options:
        yield (
            f"options {c.options} mean nothing when name is {c.name!r}, which is built in; use the keys of the "
            "source itself, or name a source of your own"
        )
    if c.name == "builtin":
        yield from _builtin_problems(c)
    if c.dtype is not None and c.dtype not in DTYPES:
        yield (
            f"dtype {c.dtype!r} must be one of {', '.join(DTYPES)}; use the dtype the file was written with, or "
            "remove it when the file has a sidecar"
        )
    if c.split not in SPLITS:
        yield f'split {c.split!r} must be "train" or "validation"; use split = "train"'
    if c.verify not in VERIFY:
        yield f'verify {c.verify!r} must be one of {", ".join(VERIFY)}; use verify = "touch"'


def _share_problems(c: TrainingSourceConfig) -> Iterator[str]:
    if c.weight is not None and not _is_weight(c.weight):
        yield f"weight {c.weight!r:.40} must be a finite number of at least 0; use 1.0"
    if c.max_epochs is not None and not _is_int(c.max_epochs, 1, 1 << 20):
        yield f"max_epochs {c.max_epochs!r:.40} must be a whole number from 1 to 2**20; use 4"


def _phase_problems(c: PhaseConfig) -> Iterator[str]:
    if not _is_int(c.start_tokens, 1, 1 << 60):
        yield f"start_tokens {c.start_tokens!r:.40} must be a whole number of at least 1; give the tokens before it"
    for name, weight in c.weights.items():
        if not _is_weight(weight):
            yield f"weights.{name} {weight!r:.40} must be a finite number of at least 0; use 1.0"
    if c.weights and not any(c.weights.values()):
        yield f"weights {c.weights} must have one above 0; name the sources that go on"
    if not (_is_weight(c.lr_multiplier) and c.lr_multiplier > 0):
        yield f"lr_multiplier {c.lr_multiplier!r:.40} must be a finite number above 0; use 1.0"
    if not c.weights and c.lr_multiplier == 1.0:
        yield "changes nothing; give it weights, or an lr_multiplier"


def _is_weight(value: Any) -> bool:
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and 0 <= value < float("inf")
    )


def _mixture_problems(c: DataConfig) -> Iterator[str]:
    """Problems of weights and phases, which only together make sense."""
    weighted = [name for name, source in c.sources.items() if source.weight is not None]
    names = ", ".join(c.sources)
    if len(c.sources) == 1 and weighted:
        yield f"sources.{weighted[0]}.weight means nothing for the only source; remove it, or add a source"
    elif weighted and len(weighted) < len(c.sources):
        missing = next(name for name in c.sources if name not in weighted)
        yield f"sources.{missing}.weight must be given, as {weighted[0]} has one; give all of them one, or none"
    elif weighted and not any(c.sources[name].weight for name in weighted):
        yield f"sources ({names}) must have one with a weight above 0; raise one"
    if not (_is_weight(c.temperature) and c.temperature > 0):
        yield f"temperature {c.temperature!r:.40} must be a finite number above 0; use 1.0"
    elif len(c.sources) == 1 and c.temperature != 1.0:
        yield f"temperature {c.temperature} means nothing for the only source; remove it, or add a source"
    starts: dict[int, str] = {}
    for name, phase in c.phases.items():
        for source in phase.weights:
            if source not in c.sources:
                yield f"phases.{name}.weights {source!r} must be one of the sources, {names}; correct the name"
        if len(c.sources) == 1 and phase.weights:
            yield f"phases.{name}.weights mean nothing for the only source; remove them"
        if phase.start_tokens in starts:
            yield (
                f"phases.{name}.start_tokens {phase.start_tokens} must differ from that of {starts[phase.start_tokens]}; "
                "make them one phase"
            )
        starts[phase.start_tokens] = name


def _is_known(name: str) -> bool:
    if name in BUILT_IN or _IMPORT_PATH.fullmatch(name):
        return True
    return any(entry.name == name for entry in entry_points(group=SOURCES_GROUP))


def _builtin_problems(c: SourceConfig) -> Iterator[str]:
    """Problems of keys that only token files have."""
    if c.path is not None:
        yield (
            f"path {c.path!r} means nothing when name is {c.name!r}, whose text comes with Python; remove path, "
            'or set name = "tokens"'
        )
    if c.dtype is not None:
        yield f"dtype {c.dtype!r} means nothing when name is {c.name!r}; remove dtype"
    if c.verify in VERIFY[1:]:
        yield (
            f"verify {c.verify!r} means nothing when name is {c.name!r}, which has no files; remove verify"
        )


def _data_problems(c: DataConfig) -> Iterator[str]:
    for name, least, most, fix in (
        ("seq_len", 1, MAX_SEQ_LEN, "use seq_len = 256"),
        ("num_workers", 0, MAX_WORKERS, "use num_workers = 0 to read in the training process"),
    ):
        value = getattr(c, name)
        if not _is_int(value, least, most):
            # cut: a number may have a million digits
            yield (
                f"{name} {value!r:.40} must be a whole number of at least {least} and at most {most}; {fix}"
            )
    if c.seed is not None and not _is_int(c.seed, 0, 2**63 - 1):
        yield f"seed {c.seed!r:.40} must be a whole number of at least 0 and below 2**63; use 0"
    names = ", ".join(c.sources) or "none"
    if not c.sources:
        yield (
            f'sources ({names}) must have one entry or more; add [data.sources.python_docs] with name = "builtin", or '
            'name = "tokens" and a path'
        )
    else:
        yield from _mixture_problems(c)
