# Copied from scripts/shared/streams.py; edit that file, then run scripts/copy_shared.py.
"""stdout and stderr of a command whose output may be lost: a full disk changes no exit code.

tolerate()      # first of all
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from typing import Any

__all__ = ["tolerate"]


def tolerate() -> None:
    """Replace sys.stdout and sys.stderr by streams on the same descriptors that lose what cannot be written.

    One line on stderr says so, but for a reader or terminal that is gone: `| head` has seen enough. A stream that is closed
    becomes /dev/null, with its descriptor: else a file would get its number, and lines of C code. A stream that something
    else has put in its place stays.
    """
    # a descriptor that is closed
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
            os.set_inheritable(descriptor, True)

    for descriptor, name in enumerate(("stdout", "stderr"), start=1):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - open as long as the process
            continue
        with contextlib.suppress(OSError, ValueError, AttributeError):
            if stream.fileno() == descriptor:
                stream.flush()
                output = io.BufferedWriter(_Output(descriptor))
                setattr(sys, name, io.TextIOWrapper(
                    output, stream.encoding, "replace", line_buffering=stream.line_buffering
                ))  # fmt: skip


class _Output(io.FileIO):
    """Counts bytes that cannot be written as written."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._told = False

    def write(self, data: Any) -> int:
        try:
            written = super().write(data)
            if written is not None:
                return written
            error: OSError = BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        except OSError as refused:
            error = refused
        gone = error.errno in (errno.EPIPE, errno.EIO)
        if not gone and not self._told and self.fileno() != 2:
            with contextlib.suppress(OSError):
                os.write(2, f"stdout: {error.strerror}; what is printed is lost\n".encode())
        self._told = True
        return memoryview(data).nbytes
