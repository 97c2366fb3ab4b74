"""The output folder appears complete or not at all, and an existing one is replaced only by a complete one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from forge_data.config import SPLITS
from forge_data.sources.sidecar import SIDECAR


def check_output(output: Path, inputs: Sequence[Path], overwrite: bool) -> None:
    """Raise ValueError if `output` exists, unless it holds token files and `overwrite` is True."""
    if not (output.exists() or output.is_symlink()):
        return
    if not overwrite:
        raise ValueError(
            f"output {output} must not exist yet; choose another, or replace it with overwrite=True "
            "(--overwrite)"
        )
    folders = [output, *(output / split for split in SPLITS)]
    if output.is_symlink() or not any((folder / SIDECAR).is_file() for folder in folders):
        raise ValueError(
            f"output {output} must be a folder of token files to be overwritten; choose another"
        )
    inside = [i for i in inputs if i.resolve().is_relative_to(output.resolve())]
    if inside:
        raise ValueError(
            f"input {inside[0]} must not be in the output {output}, which would be replaced; "
            "choose another output"
        )


@contextmanager
def replacing(output: Path) -> Iterator[Path]:
    """A new folder beside `output` that is renamed to it when the block ends, and removed if it raises.

    An existing `output` is moved away only when the new one is complete, and moved back if the last
    rename fails. Raises ValueError if the folder cannot be made.
    """
    output = output.absolute()
    temporary = output.with_name(f".{output.name}.tmp-{os.getpid()}")
    old = output.with_name(f".{output.name}.old-{os.getpid()}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
    except OSError as error:
        raise ValueError(
            f"output {output} must be in a folder that can be written ({error.strerror}); "
            "choose another"
        ) from None
    try:
        yield temporary
        # The files are fsynced, here their names: a rename can reach the disk first, and after a power
        # loss the output would exist without its files.
        _sync(temporary)
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
        _sync(output.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _sync(folder: Path) -> None:
    """fsync a folder: the names in it survive a power loss."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
