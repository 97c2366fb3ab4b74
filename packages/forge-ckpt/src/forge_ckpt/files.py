"""Bytes and files: zero-copy views of tensors without numpy, whole reads and writes, safe opens."""

import contextlib
import ctypes
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import torch

from forge_ckpt.errors import CorruptCheckpoint

# What a damaged or tampered directory looks like; anything else (EACCES, EMFILE) is not corruption.
_DAMAGE = {errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.EIO}


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as writable bytes; keep the tensor alive meanwhile."""
    assert tensor.device.type == "cpu", "stage the tensor first"
    assert tensor.is_contiguous(), "stage the tensor first"
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(bytearray())
    if tensor.data_ptr() == 0:  # reading there would end the process
        raise ValueError(
            f"{type(tensor).__name__} of {tuple(tensor.shape)} has no memory of its own"
        )
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")


def read_at(fd: int, view: memoryview, offset: int) -> int:
    """Fill ``view`` from ``offset``; returns the bytes read, fewer only at the end of the file."""
    done = 0
    while done < len(view):
        count = os.preadv(fd, [view[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def write_at(fd: int, view: memoryview, offset: int) -> None:
    """Write all of ``view`` at ``offset``; a short write goes on until done or an OSError says why."""
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)


def write_file(path: Path, data: bytes) -> None:
    """A new file with ``data``, on the disk when this returns."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        write_at(fd, memoryview(data), 0)
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_directory(path: Path) -> None:
    """Make the names in ``path`` durable, as fsync of a file does not."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def damage_is_corruption(what: str) -> Iterator[None]:
    """Turn the errors of a missing, linked or unreadable file into CorruptCheckpoint."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DAMAGE:
            raise
        raise CorruptCheckpoint(f"{what}: {error.strerror}") from error


class Directory:
    """A checkpoint directory held open: it can be renamed meanwhile, and no name leads out of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with damage_is_corruption(str(path)):
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            self._fd = os.open(path, flags)

    def open(self, name: str) -> tuple[int, int]:
        """(descriptor, size) of a regular file; links, devices and pipes raise CorruptCheckpoint."""
        where = f"{self.path / name}"
        with damage_is_corruption(where):
            # O_NONBLOCK: opening a pipe that nobody writes must not hang
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(name, flags, dir_fd=self._fd)
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            raise CorruptCheckpoint(f"{where}: not a regular file")
        return fd, status.st_size

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> "Directory":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
