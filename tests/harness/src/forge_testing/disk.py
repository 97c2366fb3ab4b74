"""A disk that waits or is full when a test says so."""

import errno
import threading
from typing import Any

import forge_ckpt.write.blocks

# a module that imports the function, and so has it by name
_blocks: Any = forge_ckpt.write.blocks


class Disk:
    """Holds each write to the data file of a checkpoint until it is open; the next `refuses` ones fail.

    disk = Disk()
    disk.close()                    # writes wait
    store.save(1, state, wait=False)
    disk.open()
    disk.restore()
    """

    def __init__(self) -> None:
        self._open = threading.Event()
        self._write = _blocks.write_at
        self.refuses = 0
        self.open()
        _blocks.write_at = self

    def __call__(self, fd: int, view: memoryview, offset: int) -> None:
        assert self._open.wait(60)
        if self.refuses:
            self.refuses -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        self._write(fd, view, offset)

    def open(self) -> None:
        """Let writes pass."""
        self._open.set()

    def close(self) -> None:
        """Hold writes from now on."""
        self._open.clear()

    def restore(self) -> None:
        """Open it for good."""
        self.open()
        _blocks.write_at = self._write
