"""One writer per store: flock on a file that names its owner. The kernel lets go when it dies."""

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import stat
import weakref
from datetime import UTC, datetime
from pathlib import Path

from forge_ckpt.errors import StoreInUse
from forge_ckpt.files import read_at

NAME = "lock"
logger = logging.getLogger("forge_ckpt")
_NO_FLOCK = {errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL}


class Lock:
    """Taken when made; raises StoreInUse naming the owner while another process writes.

    ``held`` is False on a file system without flock: one warning says so, and work goes on.
    ``owner`` is what the file says of us.
    """

    owner: str

    def __init__(self, directory: Path) -> None:
        self._path = directory / NAME
        # O_NONBLOCK: a pipe in its place must not hang
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        self._fd = os.open(self._path, flags, 0o644)
        try:
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                raise OSError(errno.EINVAL, "not a regular file", str(self._path))
            self.held = self._take()
        except BaseException:
            self.release()
            raise
        _open_locks.add(self)

    def release(self) -> None:
        """Let go; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self.held = False

    def refuse_moved(self) -> None:
        """Raise OSError where the directory at our path is no longer the one that was locked."""
        mine = os.fstat(self._fd)
        with contextlib.suppress(OSError):
            there = os.stat(self._path, follow_symlinks=False)
            if (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino):
                return
        reason = "was moved or removed while this job writes to it; put it back, then start again"
        raise FileNotFoundError(errno.ENOENT, reason, str(self._path.parent))

    def _take(self) -> bool:
        held = True
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise StoreInUse(self._refusal()) from None
            if error.errno not in _NO_FLOCK:
                raise
            held = False
            logger.warning(
                "%s: this file system has no flock (%s): a second writer would not be noticed, and "
                "left-over temporary directories are kept",
                self._path,
                error.strerror,
            )
        started = datetime.now(UTC).isoformat(timespec="milliseconds")
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "started": started}
        self.owner = json.dumps(owner)
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, self.owner.encode(), 0)
        return held

    def _refusal(self) -> str:
        buffer = bytearray(4096)
        size = read_at(self._fd, memoryview(buffer), 0)
        who = "another process"
        with contextlib.suppress(ValueError, TypeError, KeyError):
            owner = json.loads(bytes(buffer[:size]))
            who = f"pid {owner['pid']} on {owner['host']} since {owner['started']}"
        return (
            f"{self._path.parent} is written by {who}; wait for it or stop it, use another directory, "
            "or open the store with read_only=True"
        )


def refuse_another_directory(directory: Path, owner: str | None) -> None:
    """Raise ValueError where ``directory`` is not the one that ``owner`` (of a Lock) has locked.

    So a path that is local to each host is found when the store opens, and not as a missing file.
    """
    if owner is None:
        return
    try:
        found = (directory / NAME).read_text()
    except OSError as error:
        found = error.strerror or ""
    if found != owner:
        raise ValueError(
            f"{directory} on host {socket.gethostname()} is not the directory that rank 0 sees "
            "there; use a path on a file system that all ranks share"
        )


_open_locks: weakref.WeakSet[Lock] = weakref.WeakSet()


def _forget_in_child() -> None:
    # A forked data worker shares the lock's open file; it would hold the lock after our death.
    for lock in list(_open_locks):
        lock.release()


os.register_at_fork(after_in_child=_forget_in_child)
