"""Verified reads: each touched block is read completely and compared with its digest."""

import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from forge_ckpt import codec
from forge_ckpt._shared.file_bytes import read_at
from forge_ckpt.errors import corrupt
from forge_ckpt.files import Directory, file_stamp, os_errors_as_corruption, read_cached
from forge_ckpt.manifest import BLOCK_BYTES, FileEntry, Manifest

# A scratch block for each reading thread, used again so that reads take no new memory.
_thread = threading.local()


@dataclass(frozen=True)
class Segment:
    """Bytes of ``file`` from ``start`` on, to be read into all of ``destination``.

    With ``deferred`` they are verified first, in a scratch block, and read by a second call.
    """

    file: str
    start: int
    destination: memoryview
    deferred: bool = False


@dataclass
class LastBlock:
    """The block that ended one read, verified: the next read, of a small tensor beside, may need it too."""

    file: str = ""
    index: int = -1
    content: memoryview | bytes = b""


@dataclass(frozen=True)
class _Piece:
    begin: int  # in the block, as a segment may begin in one and end in another
    destination: memoryview
    deferred: bool = False


# File -> block -> its pieces, so that each block is read only once.
_Touched = dict[str, dict[int, list[_Piece]]]
_Stamp = tuple[int, ...]


def read_segments(
    directory: Directory,
    table: Manifest,
    segments: Iterable[Segment],
    threads: int,
    last: LastBlock | None = None,
) -> Callable[[], None]:
    """Verify all touched blocks and fill the destinations; returns the call that fills the deferred ones.

    Raises CorruptCheckpoint naming file, block and bytes. Some destinations may be filled then: one that
    is not deferred must be staging memory, never a caller's tensor. Cost: one read and one sha256 (about
    2 GB/s a thread) of each touched block; none of ``last``, the block in which the read before ended. It
    becomes the block in which this one ends.

    The second call reads from the page cache what was verified there. It verifies again, and raises as the
    first, what has left the cache (one more read and sha256) and the files whose size, modification
    time or inode changed since the first call opened them; ``directory`` must be open until then.
    """
    touched: _Touched = {}
    for segment in segments:
        blocks = touched.setdefault(segment.file, {})
        done = 0
        while done < len(segment.destination):
            index, begin = divmod(segment.start + done, BLOCK_BYTES)
            count = min(BLOCK_BYTES - begin, len(segment.destination) - done)
            destination = segment.destination[done : done + count]
            piece = _Piece(begin, destination, segment.deferred)
            blocks.setdefault(index, []).append(piece)
            done += count

    following = None if last is None else _take_last(last, table, touched)
    stamps: dict[str, set[_Stamp]] = {}
    _read(directory, table, touched, _block, threads, stamps)
    if last is not None and following is not None:
        last.file, last.index, last.content = following.file, following.index, following.content

    def read_deferred() -> None:
        later: _Touched = {}
        for name, blocks in touched.items():
            for index, pieces in blocks.items():
                if found := [replace(p, deferred=False) for p in pieces if p.deferred]:
                    later.setdefault(name, {})[index] = found
        _read(directory, table, later, _cached_block, threads, stamps)
        changed = {name: blocks for name, blocks in later.items() if len(stamps[name]) > 1}
        _read(directory, table, changed, _block, threads)

    return read_deferred


def _take_last(last: LastBlock, table: Manifest, touched: _Touched) -> LastBlock | None:
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
    every: _Touched = {
        name: {i: [] for i in range(len(table.files[name].blocks))} for name in names
    }
    _read(directory, table, every, _block, threads, progress=progress)


def _read(
    directory: Directory,
    table: Manifest,
    touched: _Touched,
    read_block: Callable[..., None],
    threads: int,
    stamps: dict[str, set[_Stamp]] | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> None:
    """Call ``read_block`` for each touched block; ``stamps`` gets each file's, before and after its reads."""
    if not touched:
        return
    done = 0
    digest_of = codec.digest_function(table.digest)
    pool = ThreadPoolExecutor(threads, thread_name_prefix="forge-ckpt-read")
    # More files than threads are open, so that none waits at the end of a file; and not all of them,
    # which may be more than a process may open.
    opened: deque[tuple[str, int, list[tuple[Future[None], int]]]] = deque()

    def stamp(name: str, fd: int) -> None:
        if stamps is not None:
            stamps.setdefault(name, set()).add(file_stamp(fd))

    def finish_oldest() -> None:
        nonlocal done
        name, fd, reads = opened[0]
        for future, size in reads:
            future.result()
            done += size
            progress(done)
        stamp(name, fd)
        opened.popleft()
        os.close(fd)

    try:
        for name, blocks in touched.items():
            entry, where = table.files[name], str(directory.path / name)
            fd, _ = directory.open(name)
            opened.append((name, fd, reads := []))
            stamp(name, fd)
            for index in sorted(blocks):
                future = pool.submit(read_block, fd, entry, index, blocks[index], digest_of, where)
                reads.append((future, min(BLOCK_BYTES, entry.size - index * BLOCK_BYTES)))
            if len(opened) > threads:
                finish_oldest()

        while opened:
            finish_oldest()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        for _, fd, _ in opened:
            os.close(fd)


def _block(
    fd: int, entry: FileEntry, index: int, pieces: list[_Piece], digest_of: codec.Digest, where: str
) -> None:
    """Read a block, compare it with its digest, and copy the pieces that are not deferred."""
    start = index * BLOCK_BYTES
    size = min(BLOCK_BYTES, entry.size - start)
    # A destination of a whole block is read into directly. It may then hold bytes of a damaged
    # block, which is why destinations are staging memory.
    whole = len(pieces) == 1 and len(pieces[0].destination) == size and not pieces[0].deferred
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
        for piece in (piece for piece in pieces if not piece.deferred):
            end = piece.begin + len(piece.destination)
            piece.destination[:] = block[piece.begin : end]


def _cached_block(
    fd: int, entry: FileEntry, index: int, pieces: list[_Piece], *others: Any
) -> None:
    """Fill the pieces of a verified block from the page cache; what has left it is verified again."""
    start = index * BLOCK_BYTES
    if not all(read_cached(fd, piece.destination, start + piece.begin) for piece in pieces):
        _block(fd, entry, index, pieces, *others)


def _scratch() -> memoryview:
    """Memory of one block for this thread, used again."""
    if not hasattr(_thread, "block"):
        _thread.block = memoryview(bytearray(BLOCK_BYTES))
    block: memoryview = _thread.block
    return block
