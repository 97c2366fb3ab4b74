"""Damage on disk is found: by digests of files and of their blocks, and by falling offsets."""

from __future__ import annotations

import functools
import hashlib
import time
from pathlib import Path

import numpy as np

from forge_data._shared.problems import invalid
from forge_data.errors import InvalidData

BLOCK_BYTES = 1 << 17  # Linux's readahead reads as much; 256 bytes of digests per MiB of tokens
DIGEST_BYTES = hashlib.sha256().digest_size
_OFFSETS_AT_ONCE = 1 << 22
_SETTLED_NS = 2_000_000_000  # longer than the resolution of time stamps on any file system


class VerifiedBlocks:
    """The blocks of a file, each compared with its recorded sha256 when it is first touched.

    `digests` is a file of 32 bytes a block. Cost: the first touch of a block reads and hashes it, in
    each process; later ones search a bytearray of one byte a block.
    Usage: `VerifiedBlocks(tokens, digests, 1 << 17).touch(0, 4096)`.
    """

    def __init__(self, path: Path, digests: Path, block_bytes: int) -> None:
        self.path = path
        self.block_bytes = block_bytes
        self._digests = np.memmap(digests, np.uint8, mode="r").reshape(-1, DIGEST_BYTES)
        self._verified = bytearray(len(self._digests))

    def touch(self, start: int, stop: int) -> None:
        """Check the blocks of bytes start..stop-1. Raises InvalidData naming the first damaged one."""
        last = -(-stop // self.block_bytes)
        block = self._verified.find(0, start // self.block_bytes, last)
        if block < 0:
            return
        with self.path.open("rb") as file:
            while block >= 0:
                # Read, not through the map: a failing disk raises OSError here; in the map it is a
                # SIGBUS, which ends the process. The page cache then serves the map.
                file.seek(block * self.block_bytes)
                content = file.read(self.block_bytes)
                if hashlib.sha256(content).digest() != self._digests[block].tobytes():
                    begin = block * self.block_bytes
                    last_byte, fix = begin + len(content) - 1, "copy the file again"
                    rule = f"(bytes {begin}..{last_byte}) must have the sha256 of when it was written: it was damaged"
                    raise invalid(
                        "block", "damaged", block, rule, fix, where=self.path, kind=InvalidData
                    )
                self._verified[block] = 1
                block = self._verified.find(0, block + 1, last)

    def touch_all(self) -> None:
        """Check every block."""
        self.touch(0, len(self._verified) * self.block_bytes)


def check_whole(path: Path, recorded: str) -> None:
    """Raise InvalidData unless the file has the recorded sha256. Reads it once in a process."""
    if digest_once(path) != recorded:
        rule, fix = "must be the one of its sidecar", "copy it again"
        raise invalid("sha256", "mismatch", ..., rule, fix, where=path, kind=InvalidData)


def digest_once(path: Path) -> str:
    """sha256 of a file, which is read once in a process as long as it does not change."""
    status = path.stat()
    # A file that changed just now may change again within the same time stamp: do not cache its digest.
    settled = time.time_ns() - status.st_ctime_ns > _SETTLED_NS
    state = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return _digest_once(path, state) if settled else digest_of(path)


@functools.lru_cache(maxsize=64)
def _digest_once(path: Path, state: tuple[int, ...]) -> str:
    """sha256 of a file, computed once for each `state`: a job opens a source several times."""
    return digest_of(path)


def digest_of(path: Path) -> str:
    """sha256 of a file, read in blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_offsets(path: Path, documents: np.ndarray, num_tokens: int) -> None:
    """Raise InvalidData unless documents (num_documents,) rise from 0 to under `num_tokens`."""
    found = (0, "must be 0") if documents[0] != 0 else None
    for first in range(0, len(documents), _OFFSETS_AT_ONCE):
        part = documents[first : first + _OFFSETS_AT_ONCE + 1]  # each overlaps the next by one
        falls = np.flatnonzero(part[1:] <= part[:-1])  # no difference, which could overflow
        if falls.size and not found:
            i = first + int(falls[0]) + 1
            found = i, f"must be above {documents[i - 1]}"
    if documents[-1] >= num_tokens and not found:
        found = len(documents) - 1, f"must be below the {num_tokens} tokens"
    if found:
        value, fix = (found[0], int(documents[found[0]])), "copy the file again"
        rule = f"is a document and its offset, which {found[1]}: it was damaged"
        raise invalid("", "order", value, rule, fix, where=path, kind=InvalidData)
