"""What a job says about its data: sources, length of a sequence, workers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from forge_data._rules import Rule, check

DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")
SPLITS = ("train", "validation")
VERIFY = ("touch", "full", "off")
_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def _field(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


def _is_int(value: Any, minimum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def _unknown_name(v: Mapping[str, Any]) -> bool:
    known = v["name"] in ("builtin", "tokens")
    return not known and not _IMPORT_PATH.fullmatch(str(v["name"]))


SOURCE_RULES = (
    Rule(
        "source_name",
        _unknown_name,
        'name {name!r} must be "builtin", "tokens" or an import path "module:attr"',
        'use name = "tokens" with a path to token files, or name = "builtin"',
    ),
    Rule(
        "source_needs_path",
        lambda v: v["name"] == "tokens" and not v["path"],
        "path {path!r} must name token files when name is {name!r}",
        "set path to a folder written by `forge-data prepare`",
    ),
    Rule(
        "builtin_has_no_path",
        lambda v: v["name"] == "builtin" and v["path"] is not None,
        "path {path!r} means nothing when name is {name!r}, whose text comes with Python",
        'remove path, or set name = "tokens"',
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
        lambda v: not _is_int(v["seq_len"], 1),
        "seq_len {seq_len!r} must be a whole number of at least 1",
        "use seq_len = 256",
    ),
    Rule(
        "num_workers",
        lambda v: not _is_int(v["num_workers"], 0),
        "num_workers {num_workers!r} must be a whole number of at least 0",
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
        "builtin", 'where tokens come from: "builtin", "tokens" or an import path "module:attr"'
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
