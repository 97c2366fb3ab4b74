"""Lengths of the samples of a source, found once and kept in a cache.

    <cache>/vlm-lengths-<32 hex digits>.npz    lengths, numbers of records, counts

The digits are a digest of the content of the files and of the options. Pictures in files of their own are looked at only
where they were missing or damaged; one that was changed is found when its sample is read, and then the entry is removed.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from forge_vlm._shared.atomic import new_file
from forge_vlm._shared.cache import digest_of, entry_of, once
from forge_vlm._shared.record_keys import RecordKeys
from forge_vlm.data.errors import invalid
from forge_vlm.data.reader import Reader
from forge_vlm.data.records import Record, Records
from forge_vlm.data.samples import VERSION, Counted
from forge_vlm.plan import IGNORE

__all__ = ["cached", "count", "lengths_entry"]

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


def lengths_entry(cache: str | None, content: str, options: Mapping[str, Any]) -> Path:
    """The file of what determines the lengths: files by their digest, and options."""
    digest = digest_of({"version": VERSION, "counted": _COUNTED, "content": content, **options})
    return entry_of("lengths", f"vlm-lengths-{digest}.npz", cache)


def cached(entry: Path, records: Records, reader: Reader, path: str, keys: RecordKeys) -> Counted:
    """`count`, once for all processes that share the cache, which wait for the first; a small set is counted by each.

    A cache that cannot be written is said on stderr, and keeps nothing.
    """
    if len(records) <= SMALL:
        return count(records, reader, path, keys)[0]
    counted = functools.cache(lambda: count(records, reader, path, keys))
    return once(
        entry,
        lambda: _kept(entry),
        lambda: _keep(entry, *counted()),
        what=f"lengths of {path}",
        without=lambda: counted()[0],
    )


def _keep(entry: Path, found: Counted, damaged: list[Record]) -> None:
    about = {
        **{name: getattr(found, name) for name in Counted._fields[len(_ARRAYS) :]},
        _DAMAGED: _states(
            str(p.content) for r in damaged for p in r.pictures if isinstance(p.content, Path)
        ),
    }
    arrays = {name: getattr(found, name) for name in _ARRAYS}
    with new_file(entry) as file:
        np.savez(file, **arrays, about=np.frombuffer(json.dumps(about).encode(), np.uint8))


def _kept(entry: Path) -> Counted:
    """What an entry says. Raises ValueError for a damaged one, or where a picture that could not be read was changed."""
    try:
        with np.load(entry) as found:
            about = json.loads(found["about"].tobytes())
            damaged = about.pop(_DAMAGED)
            counted = Counted(*(found[name] for name in _ARRAYS), **about)
    except Exception as error:  # damaged files raise whatever numpy and zip meet
        raise ValueError(f"{type(error).__name__}: {error}") from error
    if damaged != _states(damaged):
        raise ValueError("a picture that could not be read was changed")
    return counted


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
