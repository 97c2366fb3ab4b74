"""The directories of a store: which steps there are, what is left over, what goes away.

step-00000100/                 committed (it holds a manifest)
step-00000200.tmp-9f3c21ab/    being written, or left by a writer that died
quarantine/step-00000150-0/    found corrupt, kept for people
lock                           the writer
"""

import errno
import os
import re
import secrets
import shutil
from pathlib import Path

from forge_ckpt import manifest
from forge_ckpt.files import sync_directory

QUARANTINE = "quarantine"
_STEP = re.compile(r"step-(\d{8,18})")
_TEMPORARY = re.compile(r"step-\d{8,18}\.tmp-.+")


def directory_of(root: Path, step: int) -> Path:
    """``step-00000100`` below ``root``; numbers sort as names up to 8 digits."""
    return root / f"step-{step:08d}"


def found_steps(root: Path) -> list[int]:
    """All steps with a directory, complete or not, oldest first."""
    steps = []
    for name in os.listdir(root):
        match = _STEP.fullmatch(name)
        if match and directory_of(root, int(match[1])).name == name:
            steps.append(int(match[1]))
    return sorted(steps)


def committed_steps(root: Path) -> list[int]:
    """Steps whose directory holds a manifest, oldest first."""
    found = {step: directory_of(root, step) for step in found_steps(root)}
    return [
        step
        for step, path in found.items()
        if not path.is_symlink() and (path / manifest.NAME).is_file()
    ]


def commit(written: Path, target: Path) -> None:
    """Give a complete directory its final name, durably."""
    os.rename(written, target)
    sync_directory(target.parent)


def remove(path: Path) -> None:
    """Take a step away in one rename, then delete: a crash leaves a left-over, never a half step."""
    doomed = path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def left_overs(root: Path) -> list[str]:
    """Names of directories being written, or left by a writer that died."""
    return sorted(name for name in os.listdir(root) if _TEMPORARY.fullmatch(name))


def remove_left_overs(root: Path) -> list[str]:
    """Delete temporary directories; call it only while holding the lock. Returns their names."""
    names = left_overs(root)
    for name in names:
        path = root / name
        if path.is_symlink() or not path.is_dir():
            path.unlink()
        else:
            shutil.rmtree(path)
    return names


def refuse_unwritable(root: Path) -> None:
    """Make and remove a directory, as a save would; raises OSError where it would fail."""
    place = directory_of(root, 0).with_suffix(f".tmp-{secrets.token_hex(4)}")
    place.mkdir()
    place.rmdir()


def quarantine(root: Path, step: int) -> Path:
    """Move a step to ``quarantine/step-N-<n>`` with the first free n; returns the new place."""
    place = root / QUARANTINE
    if place.is_symlink() or (place.exists() and not place.is_dir()):  # a link leads elsewhere
        reason = "must be a directory of its own; move it away"
        raise NotADirectoryError(errno.ENOTDIR, reason, str(place))
    place.mkdir(exist_ok=True)
    name = directory_of(root, step).name
    number = 0
    while os.path.lexists(place / f"{name}-{number}"):
        number += 1
    target = place / f"{name}-{number}"
    os.rename(root / name, target)
    sync_directory(place)
    sync_directory(root)
    return target


def quarantined(root: Path) -> list[str]:
    """Names in quarantine, oldest step first."""
    place = root / QUARANTINE
    return sorted(os.listdir(place)) if place.is_dir() else []
