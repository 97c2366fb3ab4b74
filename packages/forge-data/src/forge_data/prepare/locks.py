"""Locks on files, held by processes: the kernel releases those of one that dies, and children do not have them."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

__all__ = ["locked", "owner"]

_HELD = (errno.EACCES, errno.EAGAIN)


@contextmanager
def locked(path: Path, *, shared: bool = False) -> Iterator[None]:
    """Hold the lock of a file, alone or with others that share it. Who holds it alone writes who it is.

    Raises BlockingIOError where others hold it, FileNotFoundError without the file's folder. A file system without locks
    guards nothing.
    """
    file = _open(path, shared)
    while file is None:
        file = _open(path, shared)
    with file:
        if not shared:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
            file.flush()
        yield


def owner(path: Path) -> str | None:
    """What the process that holds the lock of a file wrote into it; None if none does."""
    with suppress(FileNotFoundError), path.open("r+b") as file:
        try:
            _lock(file, shared=False)
        except BlockingIOError:
            return os.pread(file.fileno(), 200, 0).decode("utf-8", "replace") or "another process"
    return None


def _open(path: Path, shared: bool) -> BinaryIO | None:
    """The file, locked; None if it was removed between the two, by a process that has ended with it."""
    file = path.open("a+b")
    try:
        _lock(file, shared)
        if os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
    except FileNotFoundError:
        pass
    except BaseException:
        file.close()
        raise
    file.close()
    return None


def _lock(file: BinaryIO, shared: bool) -> None:
    try:
        fcntl.lockf(file.fileno(), (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            raise BlockingIOError(error.errno, "its lock is held", file.name) from None
