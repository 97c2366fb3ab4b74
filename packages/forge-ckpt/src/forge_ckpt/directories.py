"""The directories of a store, and which checkpoint is the newest.

step-00000100/                     a checkpoint; it has a manifest, which was written last: it is committed
step-00000200.tmp-9f3c21ab/        temporary: being written or removed, or left by a process that died
step-00000150.tmp-again-01ab23cd/  a complete second copy of a step that is saved again (`remove_temporary`)
quarantine/step-00000150-0/        found corrupt, kept for inspection
lock                               held by the writer

The newest checkpoint is the largest N of the names ``step-N`` (`newest_step`): a load tries it first, and goes down from
there. A name without a manifest counts. A rename commits a step with its manifest, so that step has lost it, and is
corrupt; if it did not count, a store whose manifests are lost would be taken for a new one.
"""

import errno
import logging
import os
import re
import secrets
import socket
from collections.abc import Collection
from pathlib import Path

from forge_ckpt import manifest
from forge_ckpt._renamed import renamed
from forge_ckpt._shared import atomic, locks
from forge_ckpt._shared.atomic import remove, sync_folder
from forge_ckpt._shared.file_bytes import write_new_file
from forge_ckpt._shared.problems import invalid
from forge_ckpt.errors import StepExists, StoreInUse

LOCK = "lock"


class Lock(locks.Lock):
    """The lock of the store in ``directory``; the constructor raises StoreInUse, which names the writer that has it."""

    def __init__(self, directory: Path) -> None:
        try:
            super().__init__(directory / LOCK)
        except locks.Held as held:
            rule = f"is written by {held.owner}"
            fix = "wait for it or stop it, use another directory, or open the store with read_only=True"
            raise invalid("path", "in_use", str(directory), rule, fix, kind=StoreInUse) from None

    def refuse_moved(self) -> None:
        """Raise FileNotFoundError if the directory at the path is no longer the locked one."""
        if not self.is_current():
            reason = (
                "was moved or removed while this job writes to it; put it back, then start again"
            )
            raise FileNotFoundError(errno.ENOENT, reason, str(self.path.parent))


def refuse_another_directory(directory: Path, owner: str | None) -> None:
    """Raise ValueError if ``directory`` is not the one that ``owner`` (of a Lock) has locked.

    This finds a path that is local to each host when the store opens; else the first save would fail.
    """
    if owner is None:
        return
    try:
        found = (directory / LOCK).read_text()
    except OSError as error:
        found = error.strerror or ""
    if found != owner:
        rule = f"on host {socket.gethostname()} is not the directory that rank 0 sees there"
        fix = "use a path on a file system that all ranks share"
        raise invalid("path", "not_shared", str(directory), rule, fix)


# (pattern of a file, the format, the call that reads it): an error names the call, so that the user can go on.
_FORMATS = (
    (".metadata", "a checkpoint of torch.distributed.checkpoint", "forge-ckpt convert PATH OUT"),
    ("*.safetensors", "weights as Hugging Face writes them", "forge_ckpt.load_hf(path, rows)"),
    ("manifest.json", "one checkpoint", "Store on the directory above it, or ForgeReader"),
)


def refuse_foreign(path: Path) -> None:
    """Raise ValueError if ``path`` is a checkpoint itself instead of a directory of checkpoints."""
    for pattern, content, call in _FORMATS:
        found = next(path.glob(pattern), None)
        if found is not None:
            rule = f"holds {content} ({found.name}), and must be a directory of step-00000100, ..."
            fix = f"read it with {call}, and save into another directory"
            raise invalid("path", "foreign", str(path), rule, fix)


logger = logging.getLogger("forge_ckpt")
QUARANTINE = "quarantine"
_STEP = re.compile(r"step-(\d{8,18})")
_TEMPORARY = re.compile(r"step-\d{8,18}\.tmp-.+")
# A second copy of a step, complete under this name: one still being written has another ".tmp-", so it cannot match.
_AGAIN = re.compile(r"(step-\d{8,18})\.tmp-again-[0-9a-f]{8}")
# In the text of that OSError, so that a save does not call the step unsaved: its rename was done.
NOT_DURABLE = "has its name, and may not be durable"


def step_directory(root: Path, step: int) -> Path:
    """``step-00000100`` below ``root``. Names sort like their steps up to 8 digits."""
    return root / f"step-{step:08d}"


def list_steps(root: Path) -> list[int]:
    """The numbers of all names ``step-N``, oldest first: also of files and links, and of what has no manifest."""
    steps = []
    for name in os.listdir(root):
        match = _STEP.fullmatch(name)
        if match and step_directory(root, int(match[1])).name == name:
            steps.append(int(match[1]))
    return sorted(steps)


def newest_step(root: Path, up_to: int | None = None, tried: Collection[int] = ()) -> int | None:
    """The newest step of ``list_steps``, sound or not; None without one. All calls use it.

    Steps above ``up_to`` and those in ``tried`` do not count.
    """
    steps = (s for s in list_steps(root) if s not in tried and (up_to is None or s <= up_to))
    return max(steps, default=None)


def committed_steps(root: Path) -> list[int]:
    """Steps whose directory holds a manifest, oldest first: retention counts these."""
    found = {step: step_directory(root, step) for step in list_steps(root)}
    return [
        step
        for step, path in found.items()
        if not path.is_symlink() and (path / manifest.NAME).is_file()
    ]


def make_directory(path: Path) -> None:
    """Make a directory and its parents, durably: a power loss could else take a new store and all its steps."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


def commit(written: Path, target: Path) -> None:
    """Give a complete directory its final name, durably.

    The caller has fsynced its files and the directory: a rename can reach the disk before them.
    """
    os.rename(written, target)
    try:
        sync_folder(target.parent)  # else a power loss may undo the rename after save returned
    except OSError as error:
        raise OSError(
            error.errno, f"{target.name} {NOT_DURABLE}: {error.strerror or error}"
        ) from error


def second_copy(step: Path) -> Path:
    """A new name for a complete copy of a committed step, which is saved again."""
    return step.with_name(f"{step.name}.tmp-again-{secrets.token_hex(4)}")


def seal(temporary: Path, table: manifest.Manifest, target: Path) -> None:
    """Write the manifest of a complete directory and give it its final name, durably. The data files are on disk.

    Order of durability: manifest and its fsync, fsync of the directory, which makes the names of its files durable,
    rename, fsync of the parent. After a power loss at any point, a directory with its final name holds everything.
    Raises StepExists if ``target`` is there.
    """
    write_new_file(temporary / manifest.NAME, manifest.encode(table))
    atomic.sync_folder(temporary)
    if os.path.lexists(target):  # rename would silently replace an empty directory
        rule = "appeared during the save, as two writers share the directory"
        raise invalid("path", "appeared", str(target), rule, kind=StepExists)
    commit(temporary, target)


def remove_step(path: Path) -> None:
    """Rename a step to a temporary name, then delete it: a crash between leaves no half of a step."""
    doomed = path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")
    os.rename(path, doomed)
    sync_folder(path.parent)  # else the disk may have lost files and not have the new name
    remove(doomed)


def temporary_names(root: Path) -> list[str]:
    """Names of temporary directories: being written, or left by a writer that died."""
    return sorted(name for name in os.listdir(root) if _TEMPORARY.fullmatch(name))


def remove_temporary(root: Path) -> list[str]:
    """Delete temporary directories and return their names. Hold the lock: they may be in use.

    A complete copy of a step whose name is free is committed instead: its writer died after it had moved the damaged
    step to quarantine. What cannot be deleted or renamed is left with a warning: no save takes its name.
    """
    removed = []
    for name in temporary_names(root):
        path, again = root / name, _AGAIN.fullmatch(name)
        try:
            if again and not os.path.lexists(root / again[1]):
                commit(path, root / again[1])
                logger.info("%s: committed %s, which a writer left as %s", root, again[1], name)
                continue
            remove(path)
            removed.append(name)
        except OSError as error:
            logger.warning(
                "%s: unfinished %s cannot be removed (%s); it is left", root, name, error
            )
    return removed


def check_writable(root: Path) -> None:
    """Make and remove a directory, as a save would; raises OSError where it would fail."""
    probe = step_directory(root, 0).with_suffix(f".tmp-{secrets.token_hex(4)}")
    probe.mkdir()
    probe.rmdir()


def quarantine(root: Path, step: int) -> Path:
    """Move a step to ``quarantine/step-N-<n>`` with the first free n; returns the new path.

    It is moved, not deleted: the next load must not try it again, and its owner may still recover
    tensors from it.
    """
    folder = root / QUARANTINE
    # links may leave the store
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        reason = "must be a directory of its own; move it away"
        raise NotADirectoryError(errno.ENOTDIR, reason, str(folder))
    folder.mkdir(exist_ok=True)
    name = step_directory(root, step).name
    number = 0
    while os.path.lexists(folder / f"{name}-{number}"):
        number += 1
    target = folder / f"{name}-{number}"
    os.rename(root / name, target)
    sync_folder(folder)  # the new name before the old one is gone, or a crash loses both
    sync_folder(root)
    return target


def quarantined(root: Path, up_to: int | None = None) -> list[str]:
    """Names in quarantine, oldest step first; with ``up_to`` without those of later steps."""
    folder = root / QUARANTINE
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    steps = [(_STEP.match(name), name) for name in names]
    return [name for step, name in steps if up_to is None or not step or int(step[1]) <= up_to]


__getattr__ = renamed(__name__)
