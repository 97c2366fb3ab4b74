"""Conversations are read from JSONL (also packed) and parquet files and from sets saved by `datasets`, one at a time.

Tables give each object the keys of all objects of their column, with null in most. Such nulls are removed at every depth, as a
template would show them as something in the conversation; a null that JSONL has stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from forge_data._shared.jsonl import parse
from forge_data._shared.problems import ProblemError, invalid
from forge_data.config import SPLITS
from forge_data.errors import InvalidData
from forge_data.folders import files_below
from forge_data.prepare.byte_streams import COMPRESSIONS, open_bytes
from forge_data.prepare.parquet import open_parquet
from forge_data.sources.checks import check_split
from forge_data.sources.datasets_library import load_saved, one_sentence, require_library

__all__ = ["Record", "find_conversations", "read_records"]

_JSONL = (".jsonl", *(f".jsonl{packed}" for packed in COMPRESSIONS))
_PLAIN = (*_JSONL, ".parquet")
_SAVED_SET = "dataset_info.json"  # beside the .arrow files that `datasets` saves


class Record(NamedTuple):
    """`content` is what a file has at `place`, such as `talks.jsonl line 3`."""

    place: str
    content: Any


def find_conversations(path: Path, split: str) -> list[Path]:
    """The files of a split, sorted: `path` itself, or all of a folder; of `path/SPLIT` where a folder has splits.

    Raises InvalidData where there is none.
    """
    check_split(split)
    name, kinds = str(path), f"a {', '.join(_PLAIN)} file"
    if not path.exists():
        rule = f"must be {kinds} or a folder of them, but nothing is there"
        raise invalid("path", "not_found", name, rule, "check it", kind=InvalidData)
    folders = [folder for folder in SPLITS if (path / folder).is_dir()]
    if folders:
        path = path / split
    elif split == "validation":
        rule = "must hold train/ and validation/ for split validation"
        fix = "make them, or give validation a path of its own with split train"
        raise invalid("path", "no_splits", name, rule, fix, kind=InvalidData)
    if not path.is_dir():  # FIFOs and devices are never files of a split
        found = [path] if path.is_file() and path.name.endswith(_PLAIN) else []
    else:
        saved = (path / _SAVED_SET).is_file()
        endings = (".arrow",) if saved else _PLAIN
        named = files_below(path, lambda name: name.endswith(endings))
        found = [file for file in named if _is_data(file, path)]
    if not found:
        rule = f"must be {kinds}, a folder of them, or a set saved by datasets"
        raise invalid("path", "no_files", str(path), rule, "check it", kind=InvalidData)
    return found


def _is_data(file: Path, folder: Path) -> bool:
    return not any(part.startswith("cache-") for part in file.relative_to(folder).parts)


def read_records(files: list[Path]) -> Iterator[Record]:
    """All records in order, as plain JSON; lines of white space are none. Memory: one record, or a batch of parquet.

    Raises InvalidData, naming file and line, for what is no JSON and for a damaged file; ValueError where a
    library is missing.
    """
    if files[0].suffix == ".arrow":
        yield from _saved_set(files[0].parent)
        return
    for file in files:
        yield from (_parquet if file.suffix == ".parquet" else _lines)(file)


def _lines(path: Path) -> Iterator[Record]:
    with open_bytes(path, COMPRESSIONS.get(path.suffix)) as (file, _):
        for number, line in enumerate(file, start=1):
            if line.removeprefix(b"\xef\xbb\xbf").strip():
                place = f"{path} line {number}"
                yield Record(place, parse(line, place, InvalidData, "correct the line"))


def _parquet(path: Path) -> Iterator[Record]:
    number = 0
    try:
        with open_parquet(path) as file:
            names = file.schema_arrow.names
            if len(names) > len(set(names)):
                twice = max(names, key=names.count)
                rule, fix = "must be the name of one column", "write it again with other names"
                raise invalid("", "duplicate", twice, rule, fix, where=path, kind=InvalidData)
            for batch in file.iter_batches(batch_size=256):
                for row in batch.to_pylist():
                    number += 1
                    yield Record(f"{path} row {number}", _without_nulls(row))
    except (InvalidData, ProblemError, PermissionError):
        raise
    except (OSError, ValueError) as error:
        rule, fix = f"must be a parquet file ({str(error).splitlines()[0]:.200})", "write it again"
        raise invalid("", "damaged", ..., rule, fix, where=path, kind=InvalidData) from None


def _saved_set(folder: Path) -> Iterator[Record]:
    require_library("path", str(folder))
    from datasets import Dataset

    with one_sentence(str(folder)):
        found = load_saved(folder)
        assert isinstance(found, Dataset)
    for number, row in enumerate(found, start=1):
        yield Record(f"{folder} row {number}", _without_nulls(row))


def _without_nulls(value: Any) -> Any:
    """Objects without the keys whose value is null; elements of lists stay."""
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value
