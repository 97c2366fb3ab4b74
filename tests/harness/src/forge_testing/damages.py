"""Damages of files, and how tests cover their combinations with few cells."""

from __future__ import annotations

import bz2
import contextlib
import fcntl
import gzip
import lzma
import os
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest

Cell = TypeVar("Cell", bound=tuple[Any, ...])
Change = Callable[[bytes], bytes]


def flip(at: float) -> Change:
    """Change a byte at this fraction of a file."""

    def change(content: bytes) -> bytes:
        place = round(at * (len(content) - 1))
        return content[:place] + bytes([content[place] ^ 0x55]) + content[place + 1 :]

    return change


PACKERS: dict[str, Change] = {
    "": bytes,
    "gz": gzip.compress,
    "xz": lzma.compress,
    "bz2": bz2.compress,
}
PACKERS["zst"] = lambda content: (
    pytest.importorskip("zstandard").ZstdCompressor(write_checksum=True).compress(content)
)
#: Of the text, before it is packed.
ENCODINGS: dict[str, Change] = {
    "utf-16": lambda content: content.decode().encode("utf-16"),
    "utf-16 without a mark": lambda content: content.decode().encode("utf-16-be"),
    "latin-1": lambda content: content.decode().encode("latin-1"),
    "byte order mark": lambda content: b"\xef\xbb\xbf" + content,
    "CRLF": lambda content: content.replace(b"\n", b"\r\n"),
}
#: Of the bytes of the file.
BYTES: dict[str, Change] = {
    "none": bytes,
    "empty": lambda content: b"",
    "cut to a byte": lambda content: content[:1],
    "cut to a quarter": lambda content: content[: len(content) // 4],
    "cut to a half": lambda content: content[: len(content) // 2],
    "cut by a byte": lambda content: content[:-1],
    "cut by 8 bytes": lambda content: content[:-8],
    "flipped first": flip(0),
    "flipped at a quarter": flip(0.25),
    "flipped halfway": flip(0.5),
    "flipped last": flip(1),
    "garbage": lambda content: content + b"garbage",
    "zeros": lambda content: content + bytes(600),
    "two in one": lambda content: content * 2,
}


def covering(cells: Sequence[Cell]) -> set[Cell]:
    """Cells in which every pair of two values of all cells occurs."""
    seen: set[Any] = set()
    found: set[Cell] = set()
    for cell in random.Random(0).sample(cells, len(cells)):
        pairs = {*combinations(enumerate(cell), 2)} - seen
        if pairs:
            seen |= pairs
            found.add(cell)
    return found


@contextlib.contextmanager
def as_user() -> Iterator[None]:
    """Without the rights of root, which reads everything."""
    root = os.geteuid() == 0
    os.seteuid(65534 if root else os.geteuid())
    try:
        yield
    finally:
        os.seteuid(0 if root else os.geteuid())


def without_locks(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let locks fail with this error, as on some file systems."""

    def no_locks(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    monkeypatch.setattr(fcntl, "lockf", no_locks)


class FileCell(NamedTuple):
    """A file of a grid of damages: by itself, "given", or one of a "folder"."""

    format: str
    compression: str
    damage: str
    place: str


#: Damages of the file, not of what it holds.
FILES = ("wrong ending", "folder", "fifo", "dead link", "rights")


def write_damaged(path: Path, content: bytes, damage: str) -> None:
    """Write the content, or for a damage of FILES what is there in its place."""
    if damage == "folder":
        path.mkdir()
    elif damage == "fifo":
        os.mkfifo(path)
    elif damage == "dead link":
        path.symlink_to("nowhere")
    else:
        path.write_bytes(content)
    if damage == "rights":
        path.chmod(0)
