"""Check that a rename publishes only what was synced to the disk before."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock


@contextmanager
def synced_renames() -> Iterator[list[str]]:
    """Compare what `os.rename` and `os.replace` move with its content at its last `os.fsync`, in this process.

    Raises AssertionError in the rename for a file that changed after its last sync or never had one, and for a folder
    with other names in it. What was last changed before the block began is not looked at. Yields the list of the names
    that were moved, for a test to assert what it must contain.
    """
    synced: dict[tuple[int, int], str] = {}
    moved: list[str] = []
    fsync = os.fsync

    def sync(fd: int) -> None:
        fsync(fd)
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        synced[_key(path)] = _content(path)

    def checked(move: Any) -> Any:
        def replacement(source: Any, target: Any, **options: Any) -> None:
            below = Path(source).rglob("*") if Path(source).is_dir() else ()
            for path in (Path(source), *below):
                if path.stat().st_mtime_ns >= began:
                    same = synced.get(_key(path)) == _content(path)
                    assert same, (
                        f"{path.name} was not synced before {Path(target).name} was published"
                    )
            move(source, target, **options)
            moved.append(Path(target).name)

        return replacement

    with tempfile.NamedTemporaryFile() as probe:
        began = os.stat(probe.name).st_mtime_ns  # clocks of file systems are coarser than Python's
    with (
        mock.patch("os.fsync", sync),
        mock.patch("os.rename", checked(os.rename)),
        mock.patch("os.replace", checked(os.replace)),
    ):
        yield moved


def _key(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino  # a rename of the folder above keeps them


def _content(path: Path) -> str:
    content = "\n".join(sorted(os.listdir(path))).encode() if path.is_dir() else path.read_bytes()
    return hashlib.sha256(content).hexdigest()
