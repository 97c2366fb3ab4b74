# Copied from scripts/shared/paths.py; edit that file, then run scripts/copy_shared.py.
"""Paths that a user gives: a leading `~/` is the home folder, every other character stands for itself.

folder = user_path("~/data[v2]")                 # /home/ada/data[v2], not a pattern
old = files_named(folder, prefix=".tokens.tmp-")   # its entries of that beginning, sorted
text = read_regular(folder / "a.json", 1 << 20)    # bytes; a FIFO or device is rejected, not waited for
"""

from __future__ import annotations

import dataclasses
import os
import stat
from pathlib import Path
from typing import Any

from .problems import ProblemError, WithProblems, invalid


def user_path(path: str | os.PathLike[str]) -> Path:
    """The path of a text: a leading `~/` is expanded; `~ada`, `$HOME`, `*` and brackets are names like others."""
    text = os.fspath(path)
    # Path("~/") is "~"
    return Path(os.path.expanduser(text) if text == "~" or text.startswith("~/") else text)


def expand_fields(config: Any) -> None:
    """Expand a leading `~/` in each field of a frozen dataclass whose metadata has `path`: for its `__post_init__`."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.metadata.get("path") and isinstance(value, str) and value.startswith("~"):
            object.__setattr__(config, field.name, str(user_path(value)))


def files_named(folder: Path, prefix: str = "", suffix: str = "") -> list[Path]:
    """The entries of a folder whose names begin and end so, sorted: a glob whose name may hold `*?[`.

    None for a folder that is not there.
    """
    names = os.listdir(folder) if folder.is_dir() else []
    return sorted(folder / n for n in names if n.startswith(prefix) and n.endswith(suffix))


def open_regular(
    path: str | os.PathLike[str], kind: type[WithProblems] = ProblemError
) -> tuple[int, int]:
    """(descriptor, size) of a regular file, through links.

    Raises `kind` for a folder, FIFO or device: a FIFO without a writer would block for ever, a device has no end.
    Raises OSError and ValueError like `os.open`.
    """
    # O_NONBLOCK: the open of a FIFO would block before fstat can tell that it is one.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        rule, fix = "must be a regular file, not a folder, FIFO or device", "name a file"
        raise invalid("", "not_a_file", ..., rule, fix, where=path, kind=kind)
    return descriptor, status.st_size


def read_regular(
    path: str | os.PathLike[str], limit: int, kind: type[WithProblems] = ProblemError
) -> bytes:
    """The content of a regular file of at most `limit` bytes. Raises `kind` for a larger one, else as `open_regular`."""
    descriptor, size = open_regular(path, kind)
    with open(descriptor, "rb") as file:
        content = file.read(limit + 1) if size <= limit else b""
    if size > limit or len(content) > limit:
        rule, fix = f"bytes must be at most {limit}", "name the right file, or make it shorter"
        raise invalid("", "length", max(size, len(content)), rule, fix, where=path, kind=kind)
    return content
