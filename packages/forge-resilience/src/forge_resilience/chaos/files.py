"""Faults of storage, between two lives: seeded damage to files and folders of any kind."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from forge_resilience._shared.problems import invalid

_PAGE = 4096


def _flip_bit(path: Path, draw: random.Random) -> None:
    _overwrite(path, draw.randrange(_size(path)), lambda old: bytes([old[0] ^ 1 << draw.randrange(8)]))  # fmt: skip


def _zero_page(path: Path, draw: random.Random) -> None:
    page = draw.randrange(_size(path)) // _PAGE
    _overwrite(path, page * _PAGE, lambda old: bytes(len(old)), _PAGE)


def _truncate(path: Path, draw: random.Random) -> None:
    os.truncate(path, draw.randrange(_size(path)))


def _swap(path: Path, draw: random.Random) -> None:
    """The file of the same name in another folder beside its own, as a lost write or a wrong copy would leave it."""
    folders = sorted(f for f in path.parent.parent.iterdir() if f != path.parent)
    others = [f / path.name for f in folders if (f / path.name).exists()]
    if not others:
        raise FileNotFoundError(
            f"no folder beside {path.parent} holds another {path.name}; save twice first"
        )
    path.write_bytes(draw.choice(others).read_bytes())


def _wrong_json(path: Path, draw: random.Random) -> None:
    path.write_text('{"version": [], "files": 3}')


def _link_outside(path: Path, draw: random.Random) -> None:
    path.unlink()
    path.symlink_to("/etc/hostname")


def _fifo(path: Path, draw: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def _clock(path: Path, draw: random.Random) -> None:
    """Times of the folder and all in it off by a day, either way."""
    moved = time.time() + draw.choice([-86_400, 86_400])
    for found in [path.parent, *path.parent.iterdir()]:
        os.utime(found, (moved, moved))


def _stale_folders(path: Path, draw: random.Random) -> None:
    """100 temporary folders of saves that died, each with a file."""
    for number in range(100):
        stale = path.parent.with_name(f"{path.parent.name}.tmp-{draw.getrandbits(32):08x}-{number}")
        stale.mkdir()
        shutil.copy(path, stale)


def _dangling_latest(path: Path, draw: random.Random) -> None:
    """`latest` beside the folder: to nothing, to itself, or outside."""
    latest = path.parent.with_name("latest")
    latest.unlink(missing_ok=True)
    latest.symlink_to(draw.choice(["nowhere", "latest", "/etc"]))


#: Faults of storage by name: `kind(path, random)` for one file, which may also mean the folder that holds it.
FILE_KINDS: dict[str, Callable[[Path, random.Random], None]] = {
    "flip_bit": _flip_bit,
    "zero_page": _zero_page,
    "truncate": _truncate,
    "remove": lambda path, draw: path.unlink(),
    "empty": lambda path, draw: os.truncate(path, 0),
    "swap": _swap,
    "wrong_json": _wrong_json,
    "link_outside": _link_outside,
    "fifo": _fifo,
    "remove_folder": lambda path, draw: shutil.rmtree(path.parent),
    "clock": _clock,
    "stale_folders": _stale_folders,
    "dangling_latest": _dangling_latest,
}


def damage(kind: str, path: Path, seed: int) -> None:
    """Do `kind` of FILE_KINDS to a file; the same seed does the same. ValueError for an unknown kind or an empty file."""
    if kind not in FILE_KINDS:
        raise invalid("kind", "unknown", kind, f"must be one of {', '.join(FILE_KINDS)}")
    FILE_KINDS[kind](path, random.Random(seed))


def _overwrite(path: Path, at: int, change: Callable[[bytes], bytes], length: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        new = change(file.read(length))
        file.seek(at)
        file.write(new)


def _size(path: Path) -> int:
    size = path.stat().st_size
    if size == 0:
        raise invalid("", "empty", ..., "has 0 bytes", "choose a file with content", where=path)
    return size
