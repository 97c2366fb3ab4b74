"""Verified reads: each touched block is read once, completely, and compared with its digest."""

import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from forge_ckpt import digests
from forge_ckpt.errors import corrupt
from forge_ckpt.files import Directory, os_errors_as_corruption, read_at
from forge_ckpt.manifest import BLOCK_BYTES, FileEntry, Manifest

_thread = threading.local()  # one scratch block for each reading thread


@dataclass(frozen=True)
class Segment:
    """Bytes of ``file`` from ``start`` on, to be read into all of ``destination``."""

    file: str
    start: int
    destination: memoryview


@dataclass
class LastBlock:
    """The block that ended one read, verified: the next read, of a small tensor beside, may need it too."""

    file: str = ""
    index: int = -1
    content: memoryview | bytes = b""


@dataclass(frozen=True)
class _Piece:
    begin: int  # in the block
    destination: memoryview


def read_segments(
    directory: Directory,
    table: Manifest,
    segments: Iterable[Segment],
    threads: int,
    last: LastBlock | None = None,
) -> None:
    """Fill all destinations, or raise CorruptCheckpoint naming file, block and bytes.

    Some destinations may be filled when it raises: give staging memory, never the caller's tensors.
    Cost: one read and one sha256 (about 2 GB/s a thread) of each touched block; none of ``last``, the
    block in which the read before ended. It becomes the block in which this one ends.
    """
    touched: dict[str, dict[int, list[_Piece]]] = {}
    for segment in segments:
        blocks = touched.setdefault(segment.file, {})
        done = 0
        while done < len(segment.destination):
            index, begin = divmod(segment.start + done, BLOCK_BYTES)
            count = min(BLOCK_BYTES - begin, len(segment.destination) - done)
            piece = _Piece(begin, segment.destination[done : done + count])
            blocks.setdefault(index, []).append(piece)
            done += count
    following = None if last is None else _take_last(last, table, touched)
    _read(directory, table, touched, threads)
    if last is not None and following is not None:
        last.file, last.index, last.content = following.file, following.index, following.content


def _take_last(
    last: LastBlock, table: Manifest, touched: dict[str, dict[int, list[_Piece]]]
) -> LastBlock | None:
    """Copy the pieces in ``last`` instead of reading them; returns the next one, filled by the read."""
    for piece in touched.get(last.file, {}).pop(last.index, []):
        piece.destination[:] = last.content[piece.begin : piece.begin + len(piece.destination)]
    for name in [name for name, blocks in touched.items() if not blocks]:
        del touched[name]
    if not touched:
        return None
    name, blocks = next(reversed(touched.items()))
    index = max(blocks)
    size = min(BLOCK_BYTES, table.files[name].size - index * BLOCK_BYTES)
    content = memoryview(bytearray(size))
    blocks[index].append(_Piece(0, content))
    return LastBlock(name, index, content)


def verify_files(
    directory: Directory,
    table: Manifest,
    names: Collection[str],
    threads: int,
    progress: Callable[[int], None] = lambda done: None,
) -> None:
    """Compare every block of the files ``names`` with its digest; raises CorruptCheckpoint.

    ``progress`` is called after each block with the number of bytes compared so far.
    """
    every: dict[str, dict[int, list[_Piece]]] = {
        name: {i: [] for i in range(len(table.files[name].blocks))} for name in names
    }
    _read(directory, table, every, threads, progress)


def _read(
    directory: Directory,
    table: Manifest,
    touched: dict[str, dict[int, list[_Piece]]],
    threads: int,
    progress: Callable[[int], None] = lambda done: None,
) -> None:
    done = 0
    digest_of = digests.digest_function(table.digest)
    pool = ThreadPoolExecutor(threads, thread_name_prefix="forge-ckpt-read")
    # More files than threads are open, so that none waits at the end of a file; and not all of them,
    # which may be more than a process may open.
    opened: deque[tuple[int, list[tuple[Future[None], int]]]] = deque()

    def finish_oldest() -> None:
        nonlocal done
        fd, reads = opened[0]
        for future, size in reads:
            future.result()
            done += size
            progress(done)
        opened.popleft()
        os.close(fd)

    try:
        for name, blocks in touched.items():
            entry, where = table.files[name], str(directory.path / name)
            fd, _ = directory.open(name)
            opened.append((fd, reads := []))
            for index in sorted(blocks):
                future = pool.submit(_block, fd, entry, index, blocks[index], digest_of, where)
                reads.append((future, min(BLOCK_BYTES, entry.size - index * BLOCK_BYTES)))
            if len(opened) > threads:
                finish_oldest()
        while opened:
            finish_oldest()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        for fd, _ in opened:
            os.close(fd)


def _block(
    fd: int,
    entry: FileEntry,
    index: int,
    pieces: list[_Piece],
    digest_of: digests.Digest,
    where: str,
) -> None:
    start = index * BLOCK_BYTES
    size = min(BLOCK_BYTES, entry.size - start)
    # A destination of a whole block is read into directly. It may then hold bytes of a damaged
    # block, which is why destinations are staging memory.
    whole = len(pieces) == 1 and len(pieces[0].destination) == size
    block = pieces[0].destination if whole else _scratch()[:size]
    with os_errors_as_corruption(where):
        count = read_at(fd, block, start)
    if count != size:
        rule = f"bytes are there, {entry.size} were saved"
        raise corrupt(where, "", start + count, rule, code="truncated")
    if digest_of(block) != entry.blocks[index]:
        rule = f"(bytes {start}-{start + size}) does not match its digest"
        raise corrupt(where, "block", index, rule, code="digest")
    if not whole:
        for piece in pieces:
            end = piece.begin + len(piece.destination)
            piece.destination[:] = block[piece.begin : end]


def _scratch() -> memoryview:
    if not hasattr(_thread, "block"):
        _thread.block = memoryview(bytearray(BLOCK_BYTES))
    block: memoryview = _thread.block
    return block
