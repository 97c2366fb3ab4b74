"""One writer per store: the lock of a file in its directory."""

import errno
import socket
from pathlib import Path

from forge_ckpt._shared import locks
from forge_ckpt._shared.problems import invalid
from forge_ckpt.errors import StoreInUse

NAME = "lock"


class Lock(locks.Lock):
    """The lock of the store in ``directory``; the constructor raises StoreInUse, which names the writer that has it."""

    def __init__(self, directory: Path) -> None:
        try:
            super().__init__(directory / NAME)
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
        found = (directory / NAME).read_text()
    except OSError as error:
        found = error.strerror or ""
    if found != owner:
        rule = f"on host {socket.gethostname()} is not the directory that rank 0 sees there"
        fix = "use a path on a file system that all ranks share"
        raise invalid("path", "not_shared", str(directory), rule, fix)
