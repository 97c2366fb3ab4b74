"""Find the files below a folder, and read their bytes, plain or unpacked on the way."""

from __future__ import annotations

import importlib
import io
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from forge_data._shared.problems import invalid
from forge_data.errors import invalid_data

__all__ = ["COMPRESSIONS", "files_below", "open_bytes"]
#: Ending of a file name -> name of the format, as errors call it.
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".xz": "xz", ".bz2": "bzip2"}
_CHUNK = 1 << 13  # packed bytes at a time: what they unpack to is held whole
_BUFFER = 1 << 17
# Window of zstd --long=31, in which some large corpora are packed, and bytes of memory of xz.
_LARGEST_WINDOW = 1 << 31


def files_below(folder: Path, wanted: Callable[[str], bool]) -> list[Path]:
    """Return the files below a folder with wanted names, sorted; nothing hidden, and links to files and folders followed.

    A folder that several links lead to is read once, where it lies if that is below `folder` too; so circles end.
    Raises OSError for a folder that cannot be read, and InvalidData for links that lead nowhere, as to a disk that is not
    mounted, and for wanted names of FIFOs and devices. Usage: `files_below(Path("books"), lambda n: n.endswith(".txt"))`.
    """
    found: list[Path] = []
    seen: set[tuple[int, int]] = set()
    waiting = [folder]
    for top in waiting:  # grows meanwhile: links come after everything else
        for name, folders, files in os.walk(top, onerror=_raise):
            where, status = Path(name), os.stat(name)
            place = (status.st_dev, status.st_ino)
            if place in seen:
                folders.clear()
                continue
            seen.add(place)
            folders[:] = sorted(f for f in folders if not f.startswith("."))
            waiting += [where / f for f in folders if (where / f).is_symlink()]
            found += [where / f for f in files if not f.startswith(".")]

    for path in found:
        if not path.exists():
            rule, fix = "is a link that leads nowhere", "mount its disk, or remove it"
            raise invalid_data("", "not_found", ..., rule, fix, where=path)
        if wanted(path.name) and not path.is_file():
            rule = "must be a regular file, not a FIFO or device"
            raise invalid_data("", "not_a_file", ..., rule, "remove it", where=path)
    return sorted(path for path in found if wanted(path.name))


def _raise(error: OSError) -> NoReturn:
    raise error


@contextmanager
def open_bytes(
    path: Path, compression: str | None, part: tuple[int, int] | None = None
) -> Iterator[tuple[io.BufferedReader, Callable[[], int]]]:
    """Open the content of a file, and a function that returns how many bytes of the file were read.

    `part` is a range of bytes of a file that is not packed. Reads raise InvalidData for a damaged or
    truncated packed file; opening raises ValueError if zstandard is not installed. Memory of a zstd file
    and xz file is its window, usually 8 MiB, at most 2 GiB. 8 KiB are unpacked at a time, to 250 MB at the very most.
    """
    with path.open("rb", buffering=0) as file:
        if compression is None:
            start, stop = part or (0, 1 << 62)
            file.seek(start)
            plain: io.BufferedReader = io.BufferedReader(_Range(file, stop), _BUFFER)
            yield plain, plain.tell
        else:
            chunks = _unpack(file, path, compression, _unpacker(path, compression))
            unpacked: io.BufferedReader = io.BufferedReader(_Chunks(chunks), _BUFFER)
            yield unpacked, file.tell


class _Range(io.RawIOBase):
    """A file up to a position; `tell` is the position in the file."""

    def __init__(self, file: io.FileIO, stop: int) -> None:
        self._file, self._stop = file, stop

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        room = max(0, min(len(buffer), self._stop - self._file.tell()))
        return self._file.readinto(memoryview(buffer)[:room])

    def tell(self) -> int:
        return self._file.tell()


class _Chunks(io.RawIOBase):
    """A file of chunks; `tell` is the number of bytes that were read."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._rest, self._position = chunks, memoryview(b""), 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            found = next(self._chunks, None)
            if found is None:
                return 0
            self._rest = memoryview(found)
        size = min(len(buffer), len(self._rest))
        memoryview(buffer)[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        self._position += size
        return size

    def tell(self) -> int:
        return self._position


def _unpacker(path: Path, compression: str) -> Callable[[], Any]:
    """A maker of objects that unpack one gzip member, zstd frame, or stream of xz or bzip2."""
    try:
        if compression == "gzip":
            return lambda: zlib.decompressobj(wbits=31)
        if compression == "bzip2":
            return importlib.import_module("bz2").BZ2Decompressor
        if compression == "xz":
            xz = importlib.import_module("lzma")
            return lambda: xz.LZMADecompressor(xz.FORMAT_XZ, memlimit=_LARGEST_WINDOW)
        from zstandard import ZstdDecompressor
    except ImportError as error:  # Python can be built without bz2 and lzma
        rule, fix = f"needs {error.name}, which is not installed", "install it with Python"
        fix = "pip install 'forge-data[zstd]'" if compression == "zstd" else fix
        raise invalid("", "requires", ..., rule, fix, where=path) from None
    return ZstdDecompressor(max_window_size=_LARGEST_WINDOW).decompressobj


def _unpack(
    file: io.FileIO, path: Path, compression: str, new: Callable[[], Any]
) -> Iterator[bytes]:
    """Unpacked chunks of all members or frames, in order."""
    # The libraries' own file objects report no error when a zstd file ends inside a frame.
    unpacker, inside, fix = new(), True, "copy or download it again"
    between = False  # after a gzip member zeros are padding of tapes, after an xz stream its own; neither is a member
    while chunk := file.read(_CHUNK):
        while chunk := chunk.lstrip(b"\0") if between else chunk:
            try:
                unpacked = unpacker.decompress(chunk)
            except Exception as error:  # zlib.error and ZstdError have no common base but this
                rule = f"must be {compression} as its name says, but before byte {file.tell()} it is not ({error})"
                raise invalid_data("", "damaged", ..., rule, fix, where=path) from None

            inside, between, chunk = not unpacker.eof, False, b""
            yield unpacked
            if unpacker.eof:
                chunk = unpacker.unused_data
                unpacker, between = new(), compression in ("gzip", "xz")

    if inside:
        rule = f"ends after {file.tell()} bytes in the middle of its {compression} data: it was truncated"
        raise invalid_data("", "truncated", ..., rule, fix, where=path)
