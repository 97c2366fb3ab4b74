# Copied from scripts/shared/locks.py; edit that file, then run scripts/copy_shared.py.
"""Locks on files: one holder, or several that share one; the kernel releases the lock of a process that dies.

with locked(folder / "lock"):                # Held, which names the holder, where another has it
    ...
with locked(folder / "lock", wait=print):    # waits; first prints "pid 12 on node3 since 2026-11-27T10:00:00"
    ...
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import stat
import weakref
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

_HELD = (errno.EWOULDBLOCK, errno.EACCES)
_NO_LOCKS = (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL)
_OWNER_BYTES = 4096
_warned: set[Path] = set()  # folders without locks


class Held(BlockingIOError):
    """A lock that another holds; `owner` says who."""

    def __init__(self, path: Path, owner: str) -> None:
        super().__init__(errno.EWOULDBLOCK, f"is locked by {owner}", str(path))
        self.owner = owner


class Lock:
    """The constructor takes the lock of a file, which is made if it is missing.

    Args:
        path: A regular file, not a link. It holds the host, pid and start of its holder as JSON (`owner`).
        shared: Hold it together with others that share it.
        wait: Called with the holder's name before a wait for it. None: raise Held instead.

    `held` is False on a file system without locks, after one warning per folder. The lock is of the open file (flock):
    two threads exclude each other too, and forked children do not keep it.
    """

    owner = ""

    def __init__(
        self, path: Path, *, shared: bool = False, wait: Callable[[str], None] | None = None
    ) -> None:
        self.path, self.held, self._fd = path, False, -1
        _open_locks.add(self)  # first: a child that is forked during the wait has the open file too
        try:
            while not self._take(shared, wait):
                self.release()
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self.held = -1, False

    def is_current(self) -> bool:
        """Whether the file at the path is the locked one: a lock follows the inode, and another writer can hold that of
        a file which replaced ours."""
        with contextlib.suppress(OSError):
            found = os.stat(self.path, follow_symlinks=False)
            return os.path.samestat(found, os.fstat(self._fd))
        return False

    def _take(self, shared: bool, wait: Callable[[str], None] | None) -> bool:
        """False if the file was replaced between its opening and the lock."""
        # O_NONBLOCK: the open of a FIFO of that name would block for ever
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        self._fd = os.open(self.path, flags, 0o644)
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(self.path))

        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            try:
                fcntl.flock(self._fd, kind | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in _HELD:
                    raise
                if wait is None:
                    raise Held(self.path, _owner(self._fd)) from None
                wait(_owner(self._fd))
                fcntl.flock(self._fd, kind)

            self.held = True
        except OSError as error:
            if isinstance(error, Held) or error.errno not in _NO_LOCKS:
                raise
            _warn(self.path.parent, error)

        # another process may have removed the file, or put one in its place, before the lock was taken
        if self.held and not self.is_current():
            return False
        if not shared:
            started = datetime.now(UTC).isoformat(timespec="milliseconds")
            owner = {"host": socket.gethostname(), "pid": os.getpid(), "started": started}
            self.owner = json.dumps(owner)
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, self.owner.encode(), 0)
        return True


@contextlib.contextmanager
def locked(
    path: Path,
    *,
    shared: bool = False,
    wait: Callable[[str], None] | None = None,
    remove: bool = False,
) -> Iterator[Lock]:
    """Hold a Lock for the block; with `remove`, unlink its file at the end: who waits for it then takes that of a new file.

    The lock of a file that others share is not to be removed: they would go on to hold that of a file without a name.
    """
    lock = Lock(path, shared=shared, wait=wait)
    try:
        yield lock
    finally:
        if remove and lock._fd >= 0:  # not in a forked child, which does not hold it
            path.unlink(missing_ok=True)  # while it is held: later the file may be another's
        lock.release()


def holder(path: Path) -> str | None:
    """Who holds the lock of a file: "pid 12 on node3 since ..."; None if the lock is free."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return _owner(descriptor) if error.errno in _HELD else None
    finally:
        os.close(descriptor)
    return None


def _owner(descriptor: int) -> str:
    text = os.pread(descriptor, _OWNER_BYTES, 0).decode("utf-8", "replace")
    with contextlib.suppress(ValueError, TypeError, KeyError):
        owner = json.loads(text)
        return f"pid {owner['pid']} on {owner['host']} since {owner['started']}"
    return text or "another process"


def _warn(folder: Path, error: OSError) -> None:
    if folder not in _warned:
        _warned.add(folder)
        logging.getLogger(__name__).warning(
            "%s: this file system has no locks (%s); a second writer would not be noticed",
            folder,
            error.strerror,
        )


_open_locks: weakref.WeakSet[Lock] = weakref.WeakSet()


def _release_in_child() -> None:
    # A forked child has the open file too, and would hold the lock after the death of this process.
    for lock in list(_open_locks):
        lock.release()


os.register_at_fork(after_in_child=_release_in_child)
