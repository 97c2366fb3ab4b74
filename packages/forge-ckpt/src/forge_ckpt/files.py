"""Files of a checkpoint: reads from memory, direct writes, opens without links."""

import contextlib
import errno
import os
import stat
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from forge_ckpt.errors import corrupt

# Errors of a damaged or tampered directory. Others (EACCES, EMFILE) are faults of the host, so they pass unchanged.
_DAMAGE = {errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.EIO}
# Network file systems show new names of another host late, or for a moment as those of a removed file.
_LATE = {errno.ENOENT, errno.ESTALE}
# How long a read waits for a new name, which network file systems may show late to other hosts.
VISIBLE_SECONDS = 10.0


def file_stamp(fd: int) -> tuple[int, ...]:
    """What differs after a write to the file, or in another file of the name. Not the ctime: a link changes it."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def read_cached(fd: int, view: memoryview, offset: int) -> bool:
    """Fill ``view`` from the page cache. False, with any bytes in it, where some are not in memory."""
    try:
        return os.preadv(fd, [view], offset, os.RWF_NOWAIT) == len(view)
    except OSError:
        return False


def open_direct(path: Path) -> int | None:
    """A descriptor of an existing file that writes past the page cache; None where the file system has none.

    Memory, offset and length of such writes must be multiples of 4 KiB.
    """
    if not hasattr(os, "O_DIRECT"):  # macOS has none: writes then go through the page cache
        return None
    try:
        return os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None


@contextlib.contextmanager
def os_errors_as_corruption(where: str, but: Collection[int] = ()) -> Iterator[None]:
    """Turn the errors of a missing, linked or unreadable file into CorruptCheckpoint, ``but`` some.

    Faults of the host, such as EACCES, pass unchanged.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _DAMAGE or error.errno in but:
            raise
        raise corrupt(where, "", ..., str(error.strerror), code="unreadable") from error


class Directory:
    """A checkpoint directory held open by its descriptor: all files come from one checkpoint, even if
    the directory is renamed meanwhile, and no name leads out of it.

    With ``seconds`` a missing name is looked for so long. If it does not appear, that is an OSError, or, with
    ``late_is_corrupt`` as without ``seconds``, CorruptCheckpoint.
    """

    def __init__(self, path: Path, seconds: float = 0.0, late_is_corrupt: bool = False) -> None:
        self.path, self._seconds = path, seconds
        self._kept = _LATE if seconds and not late_is_corrupt else ()
        self._fd = self._open(path, str(path), os.O_RDONLY | os.O_DIRECTORY)

    def open(self, name: str) -> tuple[int, int]:
        """(descriptor, size) of a regular file; raises CorruptCheckpoint for links, devices and pipes."""
        where = f"{self.path / name}"
        # O_NONBLOCK: opening a pipe without a writer would block for ever
        fd = self._open(name, where, os.O_RDONLY | os.O_NONBLOCK, self._fd)
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            raise corrupt(where, "", ..., "is not a regular file", code="not_regular")
        return fd, status.st_size

    def has_cached_reads(self, name: str) -> bool:
        """Whether :func:`read_cached` works on the file: ext4, xfs and btrfs have it, network file systems do not."""
        fd, _ = self.open(name)
        try:
            os.preadv(fd, [bytearray(1)], 0, os.RWF_NOWAIT)
        except BlockingIOError:
            pass  # the flag works; only the byte is not in memory now
        except (OSError, AttributeError):  # only Linux has the flag
            return False
        finally:
            os.close(fd)
        return True

    def _open(self, name: Path | str, where: str, flags: int, parent: int | None = None) -> int:
        """Open a file or directory without following links, and look again for a missing one."""
        deadline = time.monotonic() + self._seconds
        with os_errors_as_corruption(where, self._kept):
            while True:
                try:
                    return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
                except OSError as error:
                    if error.errno not in _LATE or time.monotonic() >= deadline:
                        raise
                time.sleep(0.05)

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> "Directory":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
