# Copied from scripts/shared/hashed_files.py; edit that file, then run scripts/copy_shared.py.
"""A new file whose sha256 is known when it is complete.

file = HashedFile(folder / "tokens.bin")
file.write(content)
digest = file.finish()      # on the disk
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

__all__ = ["HashedFile"]


class HashedFile:
    """Counts and hashes what is written. Raises FileExistsError for a file that is there."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb")
        self._digest = hashlib.sha256()
        self.size = 0  # bytes

    def write(self, content: bytes | memoryview) -> None:
        """Append bytes."""
        self._file.write(content)
        self._digest.update(content)
        self.size += memoryview(content).nbytes

    def finish(self) -> str:
        """Sync and close the file; the sha256 of all of it, as hex digits."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return self._digest.hexdigest()

    def close(self) -> None:
        """Close the file, complete or not."""
        self._file.close()
