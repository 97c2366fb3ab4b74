"""One writer per store: flock on a file that names its owner; the kernel releases it at its death."""

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
from typing import Any

from forge_ckpt._shared.problems import invalid
from forge_ckpt.errors import StoreInUse
from forge_ckpt.files import read_at

NAME = "lock"
logger = logging.getLogger("forge_ckpt")
_NO_FLOCK = {errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL}


class Lock:
    """The constructor takes the lock; raises StoreInUse naming the owner while another process has it.

    ``held`` is False on a file system without flock, after one warning. ``owner`` is the content of
    the file: host, pid and start of this process, as JSON.
    """

    owner: str

    def __init__(self, directory: Path) -> None:
        self._path = directory / NAME
        # O_NONBLOCK: opening a pipe of that name would block for ever
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
        """Release the lock; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self.held = False

    def refuse_moved(self) -> None:
        """Raise FileNotFoundError if the directory at the path is no longer the locked one.

        flock follows the inode: in a directory that replaced ours, another writer can hold a lock too.
        """
        locked = os.fstat(self._fd)
        with contextlib.suppress(OSError):
            found = os.stat(self._path, follow_symlinks=False)
            if (found.st_dev, found.st_ino) == (locked.st_dev, locked.st_ino):
                return
        reason = "was moved or removed while this job writes to it; put it back, then start again"
        raise FileNotFoundError(errno.ENOENT, reason, str(self._path.parent))

    def _take(self) -> bool:
        held = True
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise self._in_use() from None
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
        # Written under the lock and never removed: a file of a dead owner is locked and overwritten.
        # Removing it would let a second process lock the removed inode, and a third a new file.
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "started": started}
        self.owner = json.dumps(owner)
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, self.owner.encode(), 0)
        return held

    def _in_use(self) -> Any:
        buffer = bytearray(4096)
        size = read_at(self._fd, memoryview(buffer), 0)
        writer = "another process"
        with contextlib.suppress(ValueError, TypeError, KeyError):
            owner = json.loads(bytes(buffer[:size]))
            writer = f"pid {owner['pid']} on {owner['host']} since {owner['started']}"
        fix = "wait for it or stop it, use another directory, or open the store with read_only=True"
        path, rule = str(self._path.parent), f"is written by {writer}"
        return invalid("path", "in_use", path, rule, fix, kind=StoreInUse)


def refuse_another_directory(directory: Path, owner: str | None) -> None:
    """Raise ValueError if ``directory`` is not the one that ``owner`` (of a Lock) has locked.

    This finds a path that is local to each host when the store opens; else the first save would fail.
    """
    if owner is None:
        return
    try:
        found = (directory / NAME).read_text()
    except OSError as error:
        found = error.strerror or ""
    if found != owner:
        rule = f"on host {socket.gethostname()} is not the directory that rank 0 sees there"
        fix = "use a path on a file system that all ranks share"
        raise invalid("path", "not_shared", str(directory), rule, fix)


_open_locks: weakref.WeakSet[Lock] = weakref.WeakSet()


def _release_in_child() -> None:
    # flock belongs to the open file, and a forked data worker inherits it: the worker would hold the
    # lock after the death of this process. Closing the child's descriptor does not release ours.
    for lock in list(_open_locks):
        lock.release()


os.register_at_fork(after_in_child=_release_in_child)
