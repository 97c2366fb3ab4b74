"""Index of the samples of a source (lengths, records, counts), found once and kept in a cache.

    <cache>/vlm-lengths-<32 hex digits>.npz    lengths, numbers of records, counts

The digits are a digest of the content of the files and of the options. Images in files of their own are looked at only
where they were missing or damaged; one that was changed is found when its sample is read, and then the entry is removed.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from forge_vlm._renamed import renamed
from forge_vlm._shared.atomic import new_file
from forge_vlm._shared.cache import digest_of, entry_of, once
from forge_vlm._shared.record_keys import RecordKeys
from forge_vlm.data.files import invalid
from forge_vlm.data.records import Record, Records
from forge_vlm.data.sample import SampleEncoder
from forge_vlm.sequence.plan import IGNORE

__all__ = ["SampleIndex", "cached", "count", "lengths_entry", "sample_fingerprint"]

VERSION = 2  # part of every fingerprint: raise it whenever a row would change


class SampleIndex(NamedTuple):
    """Tokens of each sample, the record that it is of, its images and its labels, all (samples,) int64, labels None where
    they are not known; whether a label has another weight than 1, and a sample branches; the number of `records`, and of
    samples without a label; `unread` keys of records, by their number."""

    lengths: np.ndarray
    kept: np.ndarray
    pictures: np.ndarray
    trained: np.ndarray | None
    weighted: bool
    branched: bool
    records: int
    unlearnt: int  # language: key of the cache and of the manifest
    unread: Mapping[str, int] = MappingProxyType({})

    def warnings(self) -> list[str]:
        """Sentences for a user."""
        counts = {
            "are left out, as a picture is missing or damaged": self.records - len(self.kept),
            "have nothing to learn": self.unlearnt,  # language: key of the cache
        }
        return [f"{n} of {self.records} samples {k}" for k, n in counts.items() if n]


def sample_fingerprint(
    options: Mapping[str, Any], counted: SampleIndex, content: str
) -> dict[str, str | int]:
    """That of samples whose files have the digest `content`."""
    said = hashlib.sha256(json.dumps(options, sort_keys=True).encode())
    lengths = hashlib.sha256(counted.lengths.astype("<i8").tobytes())
    lengths.update(counted.kept.astype("<i8").tobytes())
    return {
        "kind": f"vlm-{VERSION}",
        "content": content,
        "options": said.hexdigest()[:16],
        "samples": len(counted.lengths),
        "lengths": lengths.hexdigest()[:16],
    }


SMALL = 1000  # records up to which counting again is sooner done than looked up
_DAMAGED = "damaged"
_ARRAYS = SampleIndex._fields[:4]
_COUNTED = 5  # raise it where other samples than before have another length, or a key is an error


def count(
    records: Records, reader: SampleEncoder, path: str, keys: RecordKeys
) -> tuple[SampleIndex, list[Record]]:
    """Lengths of all samples, and the records with an image that cannot be read; InvalidSample where none is left."""
    lengths: list[int] = []
    kept: list[int] = []
    pictures: list[int] = []
    trained: list[int] = []
    damaged: list[Record] = []
    weighted, branched, unlabeled = False, False, 0

    for number in range(len(records)):
        record = records[number]
        sample, good = reader.sample(record)
        if not good:
            damaged.append(record)
            if reader.corrupt == "skip":
                continue

        labeled = sample.labels != IGNORE
        unlabeled += not labeled.any()
        branched |= sample.branches is not None
        weighted |= bool((sample.weights[labeled] != 1).any())
        lengths.append(len(sample.tokens))
        kept.append(number)
        pictures.append(len(sample.pictures))
        trained.append(int(labeled.sum()))
    if not kept:
        rule = f"must have a sample whose pictures can be read, and has none of {len(records)}"
        raise invalid("", "empty", ..., rule, "check the path and the format", where=path)

    counts = weighted, branched, len(records), int(unlabeled), dict(keys.counts)
    one, two, three, four = (np.array(v, np.int64) for v in (lengths, kept, pictures, trained))
    return SampleIndex(one, two, three, four, *counts), damaged


def lengths_entry(cache: str | None, content: str, options: Mapping[str, Any]) -> Path:
    """The file of what determines the lengths: files by their digest, and options."""
    digest = digest_of({"version": VERSION, "counted": _COUNTED, "content": content, **options})
    return entry_of("lengths", f"vlm-lengths-{digest}.npz", cache)


def cached(
    entry: Path, records: Records, reader: SampleEncoder, path: str, keys: RecordKeys
) -> SampleIndex:
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


def _keep(entry: Path, found: SampleIndex, damaged: list[Record]) -> None:
    about = {
        **{name: getattr(found, name) for name in SampleIndex._fields[len(_ARRAYS) :]},
        _DAMAGED: _states(
            str(p.content) for r in damaged for p in r.pictures if isinstance(p.content, Path)
        ),
    }
    arrays = {name: getattr(found, name) for name in _ARRAYS}
    with new_file(entry) as file:
        np.savez(file, **arrays, about=np.frombuffer(json.dumps(about).encode(), np.uint8))


def _kept(entry: Path) -> SampleIndex:
    """What an entry says. Raises ValueError for a damaged one, or where an image that could not be read was changed."""
    try:
        with np.load(entry) as found:
            about = json.loads(found["about"].tobytes())
            damaged = about.pop(_DAMAGED)
            counted = SampleIndex(*(found[name] for name in _ARRAYS), **about)
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


__getattr__ = renamed(__name__)
