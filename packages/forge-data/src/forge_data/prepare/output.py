"""The output folder appears complete or not at all, and an existing one is replaced only by a complete one."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forge_data._shared.problems import invalid
from forge_data.config import SPLITS
from forge_data.sources.sidecar import SIDECAR


def check_output(output: Path, inputs: Sequence[Path], overwrite: bool) -> None:
    """Raise ValueError if `output` exists, unless it holds token files and `overwrite` is True."""
    if not (output.exists() or output.is_symlink()):
        return
    name, other = str(output), "choose another output"
    if not overwrite:
        rule, fix = (
            "must not exist yet",
            f"{other}, or replace it with overwrite=True (--overwrite)",
        )
        raise invalid("output", "exists", name, rule, fix)
    folders = [output, *(output / split for split in SPLITS)]
    if output.is_symlink() or not any((folder / SIDECAR).is_file() for folder in folders):
        rule = "must be a folder of token files to be overwritten"
        raise invalid("output", "no_tokens", name, rule, other)
    inside = [i for i in inputs if i.resolve().is_relative_to(output.resolve())]
    if inside:
        rule = f"must not be in the output {output}, which would be replaced"
        raise invalid("inputs", "inside", str(inside[0]), rule, other)


@contextmanager
def replacing(output: Path, place: Path | None = None) -> Iterator[Path]:
    """A new folder that is renamed to `output` when the block ends, and removed if it raises.

    It is made in `place`, a folder of the same file system, or beside `output`.

    An existing `output` is moved away only when the new one is complete, and moved back if the last
    rename fails. Raises ValueError if the folder cannot be made.
    """
    output = output.absolute()
    place = output.parent if place is None else place
    temporary = place / f".{output.name}.tmp-{os.getpid()}"
    old = place / f".{output.name}.old-{os.getpid()}"
    make_folder(output, temporary)
    try:
        yield temporary
        # The files are fsynced, here their names: a rename can reach the disk first, and after a power
        # loss the output would exist without its files.
        for folder in (temporary, *(temporary / split for split in SPLITS)):
            if folder.is_dir():
                sync_folder(folder)
        if output.exists():  # a rename cannot replace a folder with files in it
            output.rename(old)
            try:
                temporary.rename(output)
            except BaseException:
                old.rename(output)
                raise
            shutil.rmtree(old)
        else:
            temporary.rename(output)
        sync_folder(output.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def make_folder(output: Path, folder: Path) -> None:
    """Make `folder`, and those above it. Raises ValueError that names the output if it cannot be made."""
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        rule = f"must be in a folder that can be written ({error.strerror})"
        raise invalid("output", "unwritable", str(output), rule, "choose another") from None


def write_json(path: Path, content: Any) -> None:
    """Write JSON as `write_file` writes."""
    write_file(path, (json.dumps(content, indent=2) + "\n").encode())


def write_file(path: Path, content: bytes) -> None:
    """Write a new name in the folder, fsync it and rename it: the file is complete or not there."""
    temporary = path.with_name(f"{path.name}.tmp-{socket.gethostname()}-{os.getpid()}")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


def sync_folder(folder: Path) -> None:
    """fsync a folder: the names in it survive a power loss."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
