"""Tokens of text, written once on a node and read like token files from then on.

    <cache>/<name>-<32 hex digits>        token files, as `prepare` writes them
    <cache>/<name>-<32 hex digits>.lock   locked by the process that writes them; its content says which

The digits are a digest of the inputs, the tokenizer and the options. Nothing is ever removed but what is damaged: delete
folders that no run needs.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from forge_data._shared.paths import files_named, user_path
from forge_data._shared.problems import invalid
from forge_data.errors import InvalidData
from forge_data.sources.token_files import TokenFiles

__all__ = ["CachedTokens", "Entry", "cache_folder", "file_states", "open_cached"]

#: Of the content of entries; another one makes new entries.
CACHE_VERSION = 1
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL)
_TICK_NS = 20_000_000  # longer than the step of a local file system's time stamps
_SECONDS_BETWEEN_LINES = 10.0


@dataclass(frozen=True)
class Entry:
    """Where the tokens of some inputs are. `title` is what a user calls the inputs."""

    folder: Path
    title: str

    @staticmethod
    def of(cache: str | None, title: str, key: Mapping[str, Any]) -> Entry:
        """The entry of `key`, plain data that determines the tokens."""
        text = json.dumps({"cache": CACHE_VERSION, **key}, sort_keys=True)
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
        name = re.sub(r"[^A-Za-z0-9_.-]+", "_", Path(title).name).lstrip(".")[:40]
        return Entry(cache_folder(cache) / f"{name or 'tokens'}-{digest}", title)

    @property
    def lock(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.lock")


class CachedTokens(TokenFiles):
    """Token files of a cache. A damaged block ends the run as in other token files, and is forgotten: the next start
    writes the entry again."""

    def read(self, start: int, stop: int) -> np.ndarray:
        """As TokenFiles.read."""
        try:
            return super().read(start, stop)
        except InvalidData as error:
            self._forget()
            fix = "start again, and it is written from its text again"
            problems = [replace(p, fix=fix) for p in error.problems]
            raise InvalidData(problems, error.where) from None

    def _forget(self) -> None:
        with contextlib.suppress(OSError):
            (self.path / "tokens.json").unlink(missing_ok=True)

    def __reduce__(self) -> tuple[Any, ...]:
        _, arguments = super().__reduce__()
        return CachedTokens, arguments


def cache_folder(cache: str | None) -> Path:
    """`cache`, by default $FORGE_CACHE or ~/.cache/forge/tokens."""
    found = cache or os.environ.get("FORGE_CACHE") or "~/.cache/forge/tokens"
    return user_path(found).absolute()


def file_states(files: Sequence[Path], root: Path) -> list[tuple[str, int, int]]:
    """(name below `root`, size, time of the last change in ns) of each file: what tells one content from another.

    Reads no content. Waits until a change after this call would have a later time stamp: at most 20 ms.
    """
    states = [
        (str(f.relative_to(root)), s.st_size, s.st_mtime_ns) for f in files for s in [f.stat()]
    ]
    newest = max(state[2] for state in states)
    age = time.time_ns() - newest
    if 0 <= age < _TICK_NS:
        time.sleep((_TICK_NS - age) / 1e9)
    return states


def open_cached(
    entry: Entry, split: str, verify: str, write: Callable[[Path, Callable[[int, int], None]], None]
) -> CachedTokens:
    """The tokens of an entry. If they are not there, or damaged, `write(folder, progress)` makes the folder, which must
    appear complete or not at all.

    One process writes, and others of the node (of all nodes, if the cache is shared) wait for it, with a line on stderr;
    a writer that dies releases the lock and leaves nothing that is believed. Raises what `write` raises, ValueError for
    a cache that cannot be written, and InvalidData for a full disk.
    """
    found = _existing(entry, split, verify)
    if found is not None:
        return found
    with _os_errors(entry), _locked(entry):
        found = _existing(entry, split, verify)  # written while this process waited
        if found is None:
            _clear(entry)
            _say(f"tokenizing {entry.title} into {entry.folder}, once")
            write(entry.folder, _progress())
            found = CachedTokens(entry.folder, split=split, verify=verify)
    return found


def _existing(entry: Entry, split: str, verify: str) -> CachedTokens | None:
    """The tokens of an entry; None if it is not there or damaged."""
    if not entry.folder.is_dir():
        return None
    try:
        return CachedTokens(entry.folder, split=split, verify=verify)
    except InvalidData as error:
        _say(f"{error}: it is in the cache, so it is written from its text again")
        return None


@contextlib.contextmanager
def _locked(entry: Entry) -> Iterator[None]:
    """Hold the entry's lock. It is the process's: the kernel releases it when that dies, and children do not have it."""
    entry.lock.parent.mkdir(parents=True, exist_ok=True)
    with entry.lock.open("a+b") as file:
        _acquire(file.fileno(), entry)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        file.flush()
        yield


def _acquire(descriptor: int, entry: Entry) -> None:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    except OSError as error:
        if error.errno in _NO_LOCKS:
            _say(
                f"{entry.lock.parent} has no file locks: other processes may write the same tokens"
            )
            return
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            raise
    who = os.pread(descriptor, 200, 0).decode("utf-8", "replace") or "another process"
    _say(f"waiting for {who}, which tokenizes {entry.title} into {entry.folder}")
    fcntl.lockf(descriptor, fcntl.LOCK_EX)


def _clear(entry: Entry) -> None:
    """Remove a damaged entry, and what a killed writer left beside it. The lock is held."""
    if entry.folder.exists():
        shutil.rmtree(entry.folder)
    for leftover in files_named(entry.folder.parent, f".{entry.folder.name}."):
        shutil.rmtree(leftover, ignore_errors=True)


@contextlib.contextmanager
def _os_errors(entry: Entry) -> Iterator[None]:
    """Errors of the file system as one sentence that names the cache."""
    fix, cache = "set cache, or $FORGE_CACHE, to a folder", str(entry.folder.parent)
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            rule = f"must have room for the tokens of {entry.title} ({error.strerror})"
            fix = f"free some, or {fix} with more"
            raise invalid("cache", "full", cache, rule, fix, kind=InvalidData) from error
        named = str(error.filename or cache)
        if named.startswith(cache) or cache.startswith(named):
            rule = f"must be a folder that can be written ({error.strerror})"
            raise invalid("cache", "unwritable", cache, rule, f"{fix} that can") from error
        raise


def _progress() -> Callable[[int, int], None]:
    """A line on stderr from time to time."""
    last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            _say(f"tokenized {done / max(total, 1):.0%}")

    return report


def _say(line: str) -> None:
    print(f"forge-data: {line}", file=sys.stderr, flush=True)
