"""What a job says about its data: sources, length of a sequence, workers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, Literal

from forge_data._rules import Rule, check
from forge_data.small_files import path_problems

DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")
BUILT_IN = ("builtin", "tokens")
SOURCES_GROUP = "forge.sources"
SPLITS = ("train", "validation")
VERIFY = ("touch", "full", "off")
# Sanity bounds: far over what is used, far under what takes a machine down.
MAX_SEQ_LEN = 1 << 24
MAX_WORKERS = 256  # of one rank
MAX_GLOBAL_BATCH = 1 << 20
MAX_TOKENS_AT_ONCE = 1 << 28  # of the rows of one rank, 8 GiB as arrays
_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def _field(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


def _is_int(value: Any, minimum: int, maximum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= maximum


def _unknown_name(v: Mapping[str, Any]) -> bool:
    name = str(v["name"])
    if name in BUILT_IN or _IMPORT_PATH.fullmatch(name):
        return False
    return not any(entry.name == name for entry in entry_points(group=SOURCES_GROUP))


SOURCE_RULES = (
    Rule(
        "source_name",
        _unknown_name,
        f'name {{name!r}} must be "builtin", "tokens", an entry point of {SOURCES_GROUP} or an import path '
        '"module:attr"',
        'use name = "tokens" with a path to token files, or name = "builtin"',
    ),
    Rule(
        "source_needs_path",
        lambda v: v["name"] == "tokens" and not v["path"],
        "path {path!r} must name token files when name is {name!r}",
        "set path to a folder written by `forge-data prepare`",
    ),
    Rule(
        "source_path",
        lambda v: bool(v["path"] and path_problems(v["path"])),
        "path {path!r} must be a file name, without NUL or lone surrogates",
        "correct it",
    ),
    Rule(
        "builtin_has_no_path",
        lambda v: v["name"] == "builtin" and v["path"] is not None,
        "path {path!r} means nothing when name is {name!r}, whose text comes with Python",
        'remove path, or set name = "tokens"',
    ),
    Rule(
        "built_in_has_no_options",
        lambda v: v["name"] in BUILT_IN and bool(v["options"]),
        "options {options} mean nothing when name is {name!r}, which is built in",
        "use the keys of the source itself, or name a source of your own",
    ),
    Rule(
        "builtin_has_no_dtype",
        lambda v: v["name"] == "builtin" and v["dtype"] is not None,
        "dtype {dtype!r} means nothing when name is {name!r}",
        "remove dtype",
    ),
    Rule(
        "source_dtype",
        lambda v: v["dtype"] is not None and v["dtype"] not in DTYPES,
        f"dtype {{dtype!r}} must be one of {', '.join(DTYPES)}",
        "use the dtype the file was written with, or remove it when the file has a sidecar",
    ),
    Rule(
        "source_split",
        lambda v: v["split"] not in SPLITS,
        'split {split!r} must be "train" or "validation"',
        'use split = "train"',
    ),
    Rule(
        "source_verify",
        lambda v: v["verify"] not in VERIFY,
        f"verify {{verify!r}} must be one of {', '.join(VERIFY)}",
        'use verify = "touch"',
    ),
    Rule(
        "builtin_has_no_verify",
        lambda v: v["name"] == "builtin" and v["verify"] in VERIFY[1:],
        "verify {verify!r} means nothing when name is {name!r}, which has no files",
        "remove verify",
    ),
)

DATA_RULES = (
    Rule(
        "seq_len",
        lambda v: not _is_int(v["seq_len"], 1, MAX_SEQ_LEN),
        f"seq_len {{seq_len!r:.40}} must be a whole number of at least 1 and at most {MAX_SEQ_LEN}",
        "use seq_len = 256",
    ),
    Rule(
        "num_workers",
        lambda v: not _is_int(v["num_workers"], 0, MAX_WORKERS),
        f"num_workers {{num_workers!r:.40}} must be a whole number of at least 0 and at most {MAX_WORKERS}",
        "use num_workers = 0 to read in the training process",
    ),
    Rule(
        "some_source",
        lambda v: len(v["sources"]) == 0,
        "sources ({source_names}) must have one entry",
        'add [data.sources.python_docs] with name = "builtin", or name = "tokens" and a path',
    ),
    Rule(
        "one_source",
        lambda v: len(v["sources"]) > 1,
        "sources ({source_names}) must have exactly one entry, as mixing is not there yet",
        "keep one entry, or prepare all texts into one folder of token files",
    ),
)

CAPABILITIES: tuple[Rule, ...] = SOURCE_RULES + DATA_RULES


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
        check(vars(self), SOURCE_RULES, "source")


@dataclass(frozen=True)
class DataConfig:
    """All that a job says about its data. Raises ValueError with one line per broken rule.

    Usage: `DataConfig(seq_len=256, sources={"python_docs": SourceConfig()})`.
    """

    seq_len: int = _field(256, "tokens in a row; labels are the same tokens, one later")
    num_workers: int = _field(0, "processes that read ahead; 0 reads in the training process")
    sources: dict[str, SourceConfig] = field(
        default_factory=dict, metadata={"help": "training text by name; one entry for now"}
    )
    validation: SourceConfig | None = field(
        default=None, metadata={"help": "held-out text that the validation loss is measured on"}
    )

    def __post_init__(self) -> None:
        names = ", ".join(self.sources) or "none"
        check({**vars(self), "source_names": names}, DATA_RULES, "data")
