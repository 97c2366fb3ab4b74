# Copied from scripts/shared/atomic.py; edit that file, then run scripts/copy_shared.py.
"""Files and folders that appear complete or not at all, also after a kill or a power loss.

write_file(folder / "state.json", text)
with new_file(folder / "rows.npz") as file:
    numpy.savez(file, **rows)
with new_folder(output, replace=True) as folder:    # what is there is replaced when the block has ended
    ...
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from .paths import files_named

_TEMPORARY = re.compile(r"\..+\.tmp-(?P<host>.+)-(?P<pid>\d+)-[0-9a-f]{8}")
_NAME_MAX = 255  # bytes
_seen: set[Path] = set()  # folders into which this process has written


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A file that gets the name `path` when the block ends, in place of what is there, and is removed if it raises.

    A file that is there gives its permissions; a link is replaced, not followed. Two fsyncs: of the file before it is
    renamed, and of its folder. What killed writers of this host left is removed.
    """
    _remove_leftovers(path.parent)
    temporary = _temporary(path.parent, path.name)
    try:
        with temporary.open("xb") as file:
            if path.is_file() and not path.is_symlink():
                os.fchmod(file.fileno(), path.stat().st_mode & 0o777)
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_file(path: Path, content: bytes | str) -> None:
    """Write a file (text as UTF-8) as `new_file` does."""
    with new_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def new_folder(target: Path, *, replace: bool = False, place: Path | None = None) -> Iterator[Path]:
    """A folder that gets the name `target` when the block ends, and is removed if it raises.

    The block fsyncs its files; the names in all folders are fsynced here. A folder that is at `target` is an OSError
    at the end, or, with `replace`, moved away when the new one is complete. It is made next to `target`, or in `place`, a
    folder of the same file system.
    """
    target = target.absolute()
    place = place or target.parent
    _remove_leftovers(place)
    temporary = _temporary(place, target.name)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        install_folder(temporary, target, replace=replace)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def install_folder(made: Path, target: Path, *, replace: bool = False) -> None:
    """Rename a complete folder to `target`, after an fsync of the names in it: a rename can reach the disk before them.

    A kill between the two renames of a replacement leaves the old folder under another name; `restore_folder`, which
    this calls first, gives it back.
    """
    for folder, _, _ in os.walk(made):
        sync_folder(Path(folder))
    restore_folder(target)

    old = _old(target)
    if replace and os.path.lexists(target):  # a rename cannot replace a folder with files in it
        target.rename(old)
        try:
            made.rename(target)
        except BaseException:
            old.rename(target)
            raise
        sync_folder(target.parent)
        _discard(old)
    else:
        made.rename(target)
        sync_folder(target.parent)


def restore_folder(target: Path) -> None:
    """Undo or finish the replacement of a folder whose writer was killed, and remove what it left next to it."""
    _seen.discard(target.parent)
    _remove_leftovers(target.parent)
    old = _old(target)
    if not os.path.lexists(old):
        return
    if os.path.lexists(target):
        _discard(old)
    else:
        old.rename(target)


def sync_folder(folder: Path) -> None:
    """fsync the names in a folder: the fsync of a file does not cover them."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file or a folder with its content; nothing if it is missing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _old(target: Path) -> Path:
    return target.with_name(_hidden(target.name, ".old"))


def _discard(old: Path) -> None:
    """Remove what was replaced, under a name from which a half of it is never restored."""
    doomed = _temporary(old.parent, old.name)
    old.rename(doomed)
    with contextlib.suppress(OSError):
        remove(doomed)


def _temporary(folder: Path, name: str) -> Path:
    return folder / _hidden(name, f".tmp-{_host()}-{os.getpid()}-{secrets.token_hex(4)}")


def _hidden(name: str, ending: str) -> str:
    """`.NAME` with an ending; a name that gets too long loses its end."""
    return "." + os.fsdecode(os.fsencode(name)[: _NAME_MAX - 1 - len(ending)]) + ending


@functools.cache
def _host() -> str:
    """12 hex digits of where process ids count: hosts may have one name, and a container has ids of its own."""
    known = [socket.gethostname()]
    with contextlib.suppress(OSError):
        known.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        known.append(str(os.stat("/proc/self/ns/pid").st_ino))
    return hashlib.sha256(str(known).encode()).hexdigest()[:12]


def _remove_leftovers(folder: Path) -> None:
    """Remove what killed processes of this host left, at the first write of this process into a folder."""
    if folder in _seen:
        return
    _seen.add(folder)
    for path in files_named(folder, "."):
        found = _TEMPORARY.fullmatch(path.name)
        if found and found["host"] == _host() and not _is_alive(int(found["pid"])):
            with contextlib.suppress(OSError):
                remove(path)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    return True
