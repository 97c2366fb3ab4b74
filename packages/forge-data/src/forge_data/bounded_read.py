"""Small files are read whole, up to a bound."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from forge_data._shared.problems import invalid
from forge_data.errors import InvalidData


def read_bounded(path: Path, limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes.

    Raises InvalidData for a larger file and for one that is not regular: a FIFO without a writer would
    block for ever, a device has no end. Raises OSError like `open`.
    """
    # O_NONBLOCK: the open of a FIFO without a writer would block before fstat can tell that it is one.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            rule = "must be a regular file, not a folder, FIFO or device"
            raise invalid("", "not_a_file", ..., rule, "replace it", where=path, kind=InvalidData)
        if status.st_size > limit:
            rule, fix = f"bytes must be at most {limit}", "put the right file there"
            raise invalid("", "length", status.st_size, rule, fix, where=path, kind=InvalidData)
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(limit)
    finally:
        os.close(descriptor)
