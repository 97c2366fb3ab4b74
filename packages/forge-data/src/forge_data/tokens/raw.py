"""Files of token ids without digests or largest id: one source of many memory-mapped shards."""

from __future__ import annotations

import functools
import hashlib
import logging
import re
import resource
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from forge_data._shared.paths import files_named, user_path
from forge_data.config import SPLITS
from forge_data.errors import invalid_data
from forge_data.tokens.format import check_not_packed, check_range, check_split

__all__ = ["IdShards", "Scan", "Shard", "find_shards", "scan_shard"]

_log = logging.getLogger("forge_data")
_BLOCK = 1 << 22  # ids per read: bounds the memory of a check
# Words of names: "fineweb_val_000001" is held out, "retrieval" and "interval" are not.
_VALIDATION = re.compile("(?<![a-z])(val|valid|validation)(?![a-z])", re.IGNORECASE)
_OTHER = re.compile("(?<![a-z])(test|dev)(?![a-z])", re.IGNORECASE)
_TRAIN = re.compile("(?<![a-z])train(?![a-z])", re.IGNORECASE)
_THREADS = 4  # that hash files side by side, as hashlib releases the GIL while it does


@dataclass(frozen=True)
class Shard:
    """`count` little-endian ids of type `dtype` from byte `offset` of a file on, up to its end."""

    path: Path
    dtype: str
    offset: int
    count: int

    @classmethod
    def of_file(cls, path: Path, dtype: str) -> Shard:
        """All of a file without a header. Raises InvalidData unless it has one id or more, and all of the last."""
        size, item = path.stat().st_size, np.dtype(dtype).itemsize
        if size == 0 or size % item:
            rule = f"bytes must be a positive multiple of {item} for dtype {dtype}"
            fix = "copy it again, or give the dtype it was written with"
            raise invalid_data("", "length", size, rule, fix, where=path)
        return cls(path, dtype, 0, size // item)

    def check_size(self) -> None:
        """Raise InvalidData unless the file ends with the last id, and has one."""
        size = self.path.stat().st_size
        expected = self.offset + self.count * np.dtype(self.dtype).itemsize
        if self.count < 1:
            rule = "ids are too few, as a file must have one"
            raise invalid_data("", "empty", self.count, rule, "remove it", where=self.path)
        if size != expected:
            state = "truncated" if size < expected else "grown"
            ids = f"{self.count} ids of {self.dtype} from byte {self.offset} on"
            rule = f"bytes must be {expected}, for {ids}: it was {state} or damaged"
            fix = "copy it again"
            raise invalid_data("", "length", size, rule, fix, where=self.path)

    def map(self) -> np.ndarray:
        """The ids, read-only, loaded when they are used."""
        self.check_size()
        kind = np.dtype(self.dtype).newbyteorder("<")
        return np.memmap(self.path, kind, mode="r", offset=self.offset, shape=(self.count,))


class Scan(NamedTuple):
    """Result of one pass over a shard: sha256, smallest and largest id, positions of the wanted id."""

    digest: str
    low: int
    high: int
    found: np.ndarray  # (n,) int64


class IdShards:
    """A source of the ids of several files, one after another, as if they were one.

    Documents begin where `documents` says, or after each `eos_id`, or at each `bos_id`; with none of these all is one
    document. Boundaries of files are not boundaries of documents: writers split documents there. The first `read`, `max_token_id` or
    `fingerprint()`, and with `eos_id` or `bos_id` the first use of `documents`, read all files once in a process (sha256
    and largest id, four files at a time); 8 bytes of memory a document. Later reads are compared with that largest id.
    Files stay mapped after a read, as long as a 16th of the descriptors of a process suffice.
    Raises InvalidData for files that are empty, or of another size than their headers say.
    Usage: `IdShards([Shard(path, "uint16", 0, 1000)], "nanogpt", eos_id=50256).read(0, 10)`.
    """

    vocab_size: int | None = None
    tokenizer: dict[str, Any] | None = None

    def __init__(
        self,
        shards: Sequence[Shard],
        kind: str,
        *,
        eos_id: int | None = None,
        bos_id: int | None = None,
        documents: np.ndarray | None = None,
    ) -> None:
        self.shards, self._kind = tuple(shards), kind
        self._eos, self._bos, self._documents = eos_id, bos_id, documents
        for shard in self.shards:
            shard.check_size()
        self._map = self._new_maps()
        self._starts = np.concatenate(
            [np.zeros(1, np.int64), np.cumsum([shard.count for shard in self.shards])]
        )  # (shards + 1,)

    @property
    def num_tokens(self) -> int:
        return int(self._starts[-1])

    @property
    def num_documents(self) -> int:
        return len(self.documents)

    @cached_property
    def documents(self) -> np.ndarray:
        """Start offsets (num_documents,) int64."""
        if self._documents is not None:
            return self._documents
        if self._eos is None and self._bos is None:
            return np.zeros(1, np.int64)
        after = self._bos is None
        found = [scan.found + start + after for scan, start in zip(self._scans, self._starts[:-1])]
        starts = np.unique(np.concatenate([np.zeros(1, np.int64), *found]))
        starts = starts[starts < self.num_tokens]
        name, value = ("eos_id", self._eos) if after else ("bos_id", self._bos)
        if len(starts) == 1 and not any(len(part) for part in found):
            key, where = f"{self._kind}.{name}", self.shards[0].path
            fix = "give the id that stands between documents, or leave it out"
            raise invalid_data(key, "unused", value, "is not a token of it", fix, where=where)
        return starts

    @property
    def max_token_id(self) -> int:
        """The largest id; the first use reads all files."""
        return max(scan.high for scan in self._scans)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Ids of tokens start..stop-1, read-only; a view inside of one file.

        Raises ValueError outside the files, and InvalidData for ids beyond what they held when they were looked through.
        """
        check_range(start, stop, self.num_tokens)
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        parts, at = [], start
        while at < stop:
            begin, end = int(self._starts[first]), min(stop, int(self._starts[first + 1]))
            part = self._map(first)[at - begin : end - begin]
            # a view keeps its file mapped: of several files they would hold all descriptors
            parts.append(part if end - at == stop - start else np.array(part))
            first, at = first + 1, end
        ids = parts[0] if len(parts) == 1 else np.concatenate([self._map(0)[:0], *parts])
        if len(ids) and (int(ids.max()) > self.max_token_id or int(ids.min()) < 0):
            where, found = self.shards[max(first - 1, 0)].path, (int(ids.min()), int(ids.max()))
            rule = (
                f"are ids between tokens {start} and {stop} of its source, and at the start of this process all were within "
                f"0..{self.max_token_id}: it changed"
            )
            raise invalid_data("", "changed", found, rule, "start again", where=where)
        return ids

    def fingerprint(self) -> dict[str, str | int]:
        """Digests of contents; paths are not in it: data may move."""
        tokens = hashlib.sha256("".join(scan.digest for scan in self._scans).encode())
        return {
            "kind": self._kind,
            "num_tokens": self.num_tokens,
            "tokens": tokens.hexdigest(),
            "documents": hashlib.sha256(self.documents.astype("<i8").tobytes()).hexdigest(),
        }

    @cached_property
    def _scans(self) -> list[Scan]:
        wanted = self._eos if self._bos is None else self._bos
        with ThreadPoolExecutor(_THREADS) as pool:
            return list(pool.map(lambda shard: scan_shard(shard, wanted), self.shards))

    def __getstate__(self) -> dict[str, Any]:
        # A worker maps the files itself: a pickled map would be a copy of the file.
        return {**vars(self), "_map": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._map = self._new_maps()

    def _new_maps(self) -> Callable[[int], np.ndarray]:
        """The ids of a shard by its number. A map holds a descriptor: it takes a 16th of what the process may have."""
        most = max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 16)
        return functools.lru_cache(most)(lambda number: self.shards[number].map())


def find_shards(path: str | Path, split: str, suffix: str, kind: str) -> list[Path]:
    """The files of a split, sorted by name: `path` itself, or those with `suffix` in the folder.

    In a folder the split is a folder train/ or validation/, or a word in the names of files: "val", "valid" or
    "validation", and "train", without which all others but those with "test" or "dev" are of the split train; a line on
    the log names these. Raises InvalidData without any.
    """
    check_split(split)
    path, wanted = user_path(path), f"a {suffix} file of {kind} or a folder of them"
    if any((path / name).is_dir() for name in SPLITS):
        found = _files(path / split, suffix)

    elif path.is_dir():
        files = _files(path, suffix)
        held_out = [file for file in files if _VALIDATION.search(file.stem)]
        rest = [file for file in files if file not in held_out]
        # if there are any, test.bin next to them is left out
        trained = [file for file in rest if _TRAIN.search(file.stem)]
        if not trained:
            other = [file for file in rest if _OTHER.search(file.stem)]
            trained = [file for file in rest if file not in other]
            if other and split == "train":
                _warn_left_out(path, tuple(file.name for file in other))

        if not trained and rest and split == "train":
            rule = f"must hold {suffix} files of training, and all have val, test or dev in their names"
            fix = "name one file, or rename them"
            raise invalid_data("path", "no_train", str(path), rule, fix)
        found = held_out if split == "validation" else trained
    else:
        found = [path] if path.is_file() and split == "train" else []
        check_not_packed(path)

    if not found and split == "validation" and path.exists():
        rule = f'must hold {suffix} files with "val" in their names, or a folder validation/, for split validation'
        fix = "give validation a path of its own with split train, or set eval.every_steps = 0"
        raise invalid_data("path", "no_validation", str(path), rule, fix)
    if not found:
        rule = f"must be {wanted}, and no such file exists"
        raise invalid_data("path", "not_found", str(path), rule, "check it")
    return found


@functools.cache  # a job opens a source several times
def _warn_left_out(folder: Path, names: tuple[str, ...]) -> None:
    _log.warning("%s: not read for training, by their names: %s", folder, ", ".join(names)[:400])


def _files(folder: Path, suffix: str) -> list[Path]:
    found = files_named(folder, suffix=suffix)
    for path in found:
        if not path.is_file():  # without it ids would be missing
            rule = f"must be a file, or a link to one, as its name ends in {suffix}"
            fix = "mount its disk, or remove it"
            raise invalid_data("", "not_a_file", ..., rule, fix, where=path)
    return found


def scan_shard(shard: Shard, wanted: int | None = None) -> Scan:
    """Read a shard once in a process, as long as it does not change, in constant memory."""
    status = shard.path.stat()
    return _scan_once(shard, wanted, (status.st_ino, status.st_mtime_ns, status.st_ctime_ns))


@functools.lru_cache(maxsize=4096)
def _scan_once(shard: Shard, wanted: int | None, state: tuple[int, ...]) -> Scan:
    """One pass of constant memory, done once for each `state` of a file: a job opens a source several times."""
    ids = shard.map()
    digest, low, high, found = hashlib.sha256(), 0, 0, [np.empty(0, np.int64)]
    for start in range(0, len(ids), _BLOCK):
        block = ids[start : start + _BLOCK]
        digest.update(block.data)
        low, high = min(low, int(block.min())), max(high, int(block.max()))
        if wanted is not None:
            found.append(np.flatnonzero(block == wanted) + start)
    if low < 0:
        rule = f"must not be negative, read as {shard.dtype}"
        fix = "copy it again, or give the dtype it was written with"
        raise invalid_data("id", "negative", low, rule, fix, where=shard.path)
    return Scan(digest.hexdigest(), low, high, np.concatenate(found))
