# Copied from scripts/shared/cache.py; edit that file, then run scripts/copy_shared.py.
"""A cache whose entries are written once, by one process of all that share it, and read from then on.

    $FORGE_CACHE/{tokens,plans,lengths}/NAME        an entry: a file or a folder (default: ~/.cache/forge/...)
    $FORGE_CACHE/{tokens,plans,lengths}/NAME.lock   locked by its writer

entry = entry_of("plans", digest_of(known))
plan = once(entry, read, write, what="packing plan")

Nothing is ever removed but what is damaged: delete entries that no run needs.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from .atomic import remove
from .locks import locked
from .paths import files_named, user_path
from .problems import ProblemError, WithProblems, invalid

T = TypeVar("T")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_THERE = (errno.EEXIST, errno.ENOTEMPTY)
_DAMAGED = (
    ValueError,
    KeyError,
    TypeError,
    FileNotFoundError,
)  # of a wrong content, or a lost file of a folder


def digest_of(known: Mapping[str, Any]) -> str:
    """32 hex digits of plain data, in any order of its keys."""
    text = json.dumps(known, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def entry_of(kind: str, name: str, cache: str | None = None) -> Path:
    """Where an entry is: in the folder `cache` if one is given, else below that of its kind.

    Before version 0.2, $FORGE_CACHE held tokens and lengths without a folder of their kind, and ~/.cache/forge/tokens both:
    such an entry is used there.
    """
    if cache:
        return user_path(cache).absolute() / name
    root = user_path(os.environ.get("FORGE_CACHE") or "~/.cache/forge").absolute()
    before = (root / name, root / "tokens" / name)
    return next((entry for entry in before if os.path.exists(entry)), root / kind / name)


def once(
    entry: Path,
    read: Callable[[], T],
    write: Callable[[], object],
    *,
    what: str,
    kind: type[WithProblems] = ProblemError,
    without: Callable[[], T] | None = None,
) -> T:
    """What `read()` returns; before that, `write()` if there is no entry, or `read` raises an error of `_DAMAGED`.

    `write` makes the entry complete or not at all, as `new_file` and `new_folder` do. The others wait for it, with a line on
    stderr; they go on if it dies. A cache that cannot be written, or is full, is reported and answered by `without()`; where
    that is None, the first raises ProblemError, as a setting is wrong, and the second `kind`. Other errors of `read` and
    `write` pass.
    """

    def found(tell: bool) -> list[T]:
        if not entry.exists():
            return []
        try:
            return [read()]
        except _DAMAGED as error:
            if tell:
                say(f"{what} in {entry} is damaged, and is made again: {error}")
            return []

    try:
        if kept := found(tell=False):
            return kept[0]
        entry.parent.mkdir(parents=True, exist_ok=True)
        wait = lambda owner: say(f"waiting for {owner}, which makes {what} in {entry}")  # noqa: E731
        with locked(entry.with_name(f"{entry.name}.lock"), wait=wait) as lock:
            if kept := found(tell=True):  # written while this process waited
                return kept[0]
            remove(entry)
            # of a killed writer; without locks it may be that of a living one
            for leftover in files_named(entry.parent, f".{entry.name}.") if lock.held else ():
                remove(leftover)
            write()
            return read()
    except OSError as error:
        if error.errno in _THERE and (kept := found(tell=False)):
            return kept[0]  # without locks, another process was first
        problem = _problem(error, entry.parent, what, kind)
        if problem is None:
            raise
        if without is None:
            raise problem from error
        say(f"{problem}; {what} is not kept, and each process makes its own")
        return without()


def say(line: str) -> None:
    """A line on stderr."""
    print(f"cache: {line}", file=sys.stderr, flush=True)


def _problem(error: OSError, cache: Path, what: str, kind: type[WithProblems]) -> Any:
    """The error that names the cache; None if the file at fault is another."""
    fix = "set $FORGE_CACHE, or the key `cache` of the source, to a folder"
    if error.errno in _FULL:
        rule = f"must have room for {what} ({error.strerror})"
        return invalid(
            "cache", "full", str(cache), rule, f"free some, or {fix} with more", kind=kind
        )
    named = str(error.filename or cache)
    if not (named.startswith(str(cache)) or str(cache).startswith(named)):
        return None
    rule = f"must be a folder that can be written ({error.strerror})"
    return invalid("cache", "unwritable", str(cache), rule, f"{fix} that can")
