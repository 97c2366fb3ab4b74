"""The files of a folder, links followed: what a corpus holds is found wherever it lies."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from forge_data._shared.problems import invalid
from forge_data.errors import InvalidData

__all__ = ["files_below"]


def files_below(folder: Path, wanted: Callable[[str], bool]) -> list[Path]:
    """The files below a folder whose names are wanted, sorted; nothing hidden, and links to files and folders followed.

    A folder that several links lead to is read once, where it lies if that is below `folder` too; so circles end.
    Raises OSError for a folder that cannot be read, and InvalidData for links that lead nowhere, as to a disk that is not
    mounted, and for wanted names of FIFOs and devices. Usage: `files_below(Path("books"), lambda n: n.endswith(".txt"))`.
    """
    found: list[Path] = []
    seen: set[tuple[int, int]] = set()
    waiting = [folder]
    for top in waiting:  # grows meanwhile: links come behind all that is no link
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
            raise invalid("", "not_found", ..., rule, fix, where=path, kind=InvalidData)
        if wanted(path.name) and not path.is_file():
            rule = "must be a regular file, not a FIFO or device"
            raise invalid("", "not_a_file", ..., rule, "remove it", where=path, kind=InvalidData)
    return sorted(path for path in found if wanted(path.name))


def _raise(error: OSError) -> NoReturn:
    raise error
