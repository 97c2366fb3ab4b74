"""One data file in blocks: the copy of a block overlaps the digest and the write of earlier ones."""

import errno
import mmap
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from forge_ckpt import codec
from forge_ckpt._shared.file_bytes import write_at
from forge_ckpt.files import open_direct
from forge_ckpt.manifest import ALIGN, BLOCK_BYTES, FileEntry


class BlockFile:
    """A new file. ``append`` copies bytes into a block; threads digest and write full blocks.

    The digest is of the copy that is written: the caller's memory may change meanwhile, and a digest
    of a later read would confirm damage. At most ``2 * threads + 1`` blocks are in memory.

    Full blocks go past the page cache, where the file system can: the copy into fresh pages costs more
    processor time than a digest with SHA extensions, and would push the job's data out of the cache.
    """

    def __init__(self, path: Path, threads: int, digest: str = codec.DEFAULT_DIGEST) -> None:
        self._digest = digest
        self._digest_of = codec.digest_function(digest)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o644)
        self._direct = self._direct_fd = open_direct(path)
        # Twice as many as digest at a time: a thread that waits for the disk digests nothing.
        self._limit = 2 * threads
        self._pool = ThreadPoolExecutor(self._limit, thread_name_prefix="forge-ckpt-write")
        self._pending: deque[tuple[Future[str], memoryview]] = deque()
        self._digests: list[str] = []
        self._block = memoryview(mmap.mmap(-1, BLOCK_BYTES))
        self._used = 0
        self._size = 0  # of the blocks before this one: its offset, as threads write in any order

    def append(self, data: memoryview) -> int:
        """Add ``data``, aligned; returns its offset. Raises OSError when a write fails."""
        self._copy(memoryview(bytes(-self._used % ALIGN)))
        start = self._size + self._used
        self._copy(data)
        return start

    def append_staged(self, data: memoryview) -> None:
        """Add the bytes of a whole file without copying them: ``data`` must not change until ``finish`` returns."""
        assert self._size + self._used == 0, "a staged file is appended at once"
        for start in range(0, len(data), BLOCK_BYTES):
            view = data[start : start + BLOCK_BYTES]
            self._pending.append((self._pool.submit(self._digest_and_write, view, start), view))
        self._size = len(data)

    def finish(self) -> FileEntry:
        """Write the last block, fsync the file; returns its size and the digests of all blocks."""
        if self._used:
            self._submit()
        while self._pending:
            self._collect()
        os.fsync(self._fd)
        return FileEntry.of(self._size, tuple(self._digests), self._digest)

    def close(self) -> None:
        """Stop the threads and close the file, complete or not."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        os.close(self._fd)
        if self._direct_fd is not None:
            os.close(self._direct_fd)

    def _copy(self, data: memoryview) -> None:
        """Copy bytes into blocks, and submit each that is full."""
        while len(data):
            count = min(BLOCK_BYTES - self._used, len(data))
            self._block[self._used : self._used + count] = data[:count]
            self._used += count
            data = data[count:]
            if self._used == BLOCK_BYTES:
                self._submit()

    def _submit(self) -> None:
        """Let a thread digest and write the current block, and take an empty one."""
        view = self._block[: self._used]
        future = self._pool.submit(self._digest_and_write, view, self._size)
        self._pending.append((future, self._block))
        self._size += self._used
        self._used = 0
        # The oldest block becomes free when its write is done: wait for it, and memory stays bounded.
        full = len(self._pending) >= self._limit
        self._block = self._collect() if full else memoryview(mmap.mmap(-1, BLOCK_BYTES))

    def _collect(self) -> memoryview:
        """Wait for the oldest block; its memory is free."""
        future, block = self._pending.popleft()
        self._digests.append(future.result())
        return block

    def _digest_and_write(self, view: memoryview, offset: int) -> str:
        digest = self._digest_of(view)
        if not self._write_direct(view, offset):
            write_at(self._fd, view, offset)
        return digest

    def _write_direct(self, view: memoryview, offset: int) -> bool:
        """Write a full block past the page cache; False if it is not full, or the file system cannot."""
        fd = self._direct
        if fd is None or len(view) < BLOCK_BYTES:
            return False
        try:
            write_at(fd, view, offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # The file system opens it so, but takes no such writes: try no more.
            self._direct = None
            return False
        return True
