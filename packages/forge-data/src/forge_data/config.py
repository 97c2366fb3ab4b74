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
class DataConfig:
    """The data section of a job. Raises ValueError with one line per broken rule.

    Usage: `DataConfig(seq_len=256, sources={"python_docs": SourceConfig()})`.
    """

    seq_len: int = _field(256, "tokens in a row; labels are the same tokens, one later")
    seed: int | None = _field(None, "seed of the order of training rows (default: that of the run)")
    num_workers: int = _field(0, "processes that read ahead; 0 reads in the training process")
    sources: dict[str, SourceConfig] = field(
        default_factory=dict, metadata={"help": "training text by name; one entry for now"}
    )
    validation: SourceConfig | None = field(
        default=None, metadata={"help": "held-out text that the validation loss is measured on"}
    )

    def __post_init__(self) -> None:
        raise_problems("data", _data_problems(self))


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
            f'sources ({names}) must have one entry; add [data.sources.python_docs] with name = "builtin", or '
            'name = "tokens" and a path'
        )
    if len(c.sources) > 1:
        yield (
            f"sources ({names}) must have exactly one entry, as mixing is not there yet; keep one entry, or "
            "prepare all texts into one folder of token files"
        )
