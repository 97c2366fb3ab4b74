"""Lengths of the samples of a source, found once and kept in a cache.

    <cache>/vlm-lengths-<32 hex digits>.npz    lengths, numbers of records, counts
    <cache>/vlm-lengths-<32 hex digits>.lock   locked by the process that finds them

The digits are a digest of the content of the files and of the options. Pictures in files of their own are looked at only
where they were missing or damaged; one that was changed is found when its sample is read, and then the entry is removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from forge_vlm._shared.paths import user_path
from forge_vlm._shared.record_keys import RecordKeys
from forge_vlm.data.errors import invalid
from forge_vlm.data.reader import Reader
from forge_vlm.data.records import Record, Records
from forge_vlm.data.samples import VERSION, Counted
from forge_vlm.plan import IGNORE

__all__ = ["cached", "count", "entry_of", "locked"]

SMALL = 1000  # records up to which counting again is sooner done than looked up
_DAMAGED = "damaged"
_ARRAYS = Counted._fields[:4]
_COUNTED = 5  # raise it where other samples than before have another length, or a key is an error


def count(
    records: Records, reader: Reader, path: str, keys: RecordKeys
) -> tuple[Counted, list[Record]]:
    """Lengths of all samples, and the records with a picture that cannot be read; InvalidSample where none is left."""
    lengths: list[int] = []
    kept: list[int] = []
    pictures: list[int] = []
    trained: list[int] = []
    damaged: list[Record] = []
    weighted, branched, unlearnt = False, False, 0
    for number in range(len(records)):
        record = records[number]
        sample, good = reader.sample(record)
        if not good:
            damaged.append(record)
            if reader.corrupt == "skip":
                continue
        learnt = sample.labels != IGNORE
        unlearnt += not learnt.any()
        branched |= sample.branches is not None
        weighted |= bool((sample.weights[learnt] != 1).any())
        lengths.append(len(sample.tokens))
        kept.append(number)
        pictures.append(len(sample.pictures))
        trained.append(int(learnt.sum()))
    if not kept:
        rule = f"must have a sample whose pictures can be read, and has none of {len(records)}"
        raise invalid("", "empty", ..., rule, "check the path and the format", where=path)
    counts = weighted, branched, len(records), int(unlearnt), dict(keys.counts)
    one, two, three, four = (np.array(v, np.int64) for v in (lengths, kept, pictures, trained))
    return Counted(one, two, three, four, *counts), damaged


def entry_of(cache: str | None, content: str, options: Mapping[str, Any]) -> Path:
    """The file of what determines the lengths: files by their digest, and options."""
    key = json.dumps(
        {"version": VERSION, "counted": _COUNTED, "content": content, **options}, sort_keys=True
    )
    folder = user_path(cache or os.environ.get("FORGE_CACHE") or "~/.cache/forge/tokens")
    return folder / f"vlm-lengths-{hashlib.sha256(key.encode()).hexdigest()[:32]}.npz"


def cached(entry: Path, records: Records, reader: Reader, path: str, keys: RecordKeys) -> Counted:
    """`count`, once for all processes that share the cache, which wait for the first; a small set is counted by each.

    A cache that cannot be written is said on stderr, and keeps nothing.
    """
    if len(records) <= SMALL:
        return count(records, reader, path, keys)[0]
    if (found := _kept(entry)) is not None:
        return found
    try:
        with locked(entry.with_suffix(".lock"), f"lengths of {path}"):
            if (found := _kept(entry)) is not None:  # written while this process waited
                return found
            found, damaged = count(records, reader, path, keys)
            _keep(entry, found, damaged)
    except OSError as error:
        if error.filename is None or not str(error.filename).startswith(str(entry.parent)):
            raise
        print(
            f"data: lengths of {path} cannot be kept in {entry.parent} ({error.strerror}), and each process finds its own; "
            "set cache, or $FORGE_CACHE",
            file=sys.stderr,
        )
        return found or count(records, reader, path, keys)[0]
    return found


@contextlib.contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Hold the lock of a file, after a wait where another process has it; the kernel releases it when that dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            print(f"data: another process finds {what}; waiting for it", file=sys.stderr)
            fcntl.lockf(file, fcntl.LOCK_EX)
        yield


def _keep(entry: Path, found: Counted, damaged: list[Record]) -> None:
    """Write an entry under its name when it is whole."""
    about = {
        **{name: getattr(found, name) for name in Counted._fields[len(_ARRAYS) :]},
        _DAMAGED: _states(
            str(p.content) for r in damaged for p in r.pictures if isinstance(p.content, Path)
        ),
    }
    temporary = entry.with_name(f".{entry.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            about_it = np.frombuffer(json.dumps(about).encode(), np.uint8)
            arrays = {name: getattr(found, name) for name in _ARRAYS}
            np.savez(file, **arrays, about=about_it)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(entry)
    finally:
        temporary.unlink(missing_ok=True)


def _kept(entry: Path) -> Counted | None:
    """What an entry says; None where it is not there, or damaged, or a picture that could not be read was changed."""
    try:
        with np.load(entry) as found:
            about = json.loads(found["about"].tobytes())
            damaged = about.pop(_DAMAGED)
            if damaged != _states(damaged):
                return None
            return Counted(*(found[name] for name in _ARRAYS), **about)
    except Exception:  # damaged files raise whatever numpy and zip meet
        return None


def _states(paths: Any) -> dict[str, list[int] | None]:
    """Size and time of the last change of files, None of one that is not there."""
    states: dict[str, list[int] | None] = {}
    for path in paths:
        try:
            found = os.stat(path)
            states[path] = [found.st_size, found.st_mtime_ns]
        except OSError:
            states[path] = None
    return states
