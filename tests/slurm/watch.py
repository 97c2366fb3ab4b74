"""Ends a test cluster when the session that started it is gone: `python watch.py SESSION_PID FOLDER`.

Daemons, step daemons and tasks leave their parents' sessions, and a step daemon outlives its slurmd. All of
them have the cluster's SLURM_CONF in their environment, or descend from one that has.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path


def processes_of(folder: Path) -> list[int]:
    """Every process of the cluster whose files are in `folder`."""
    mark = f"SLURM_CONF={folder}/slurm.conf".encode()
    return with_descendants(pid for pid in parents() if mark in environ(pid))


def with_descendants(pids: Iterable[int]) -> list[int]:
    """The processes, then their children, and so on."""
    found, level, parent_of = list[int](), set(pids), parents()
    while level:
        found += level
        level = {pid for pid, parent in parent_of.items() if parent in level}.difference(found)
    return found


def kill_all(folder: Path) -> None:
    """SIGKILL every process of the cluster; what they started meanwhile, too."""
    while left := processes_of(folder):
        kill(left)
        time.sleep(0.02)


def kill(pids: Iterable[int], number: int = signal.SIGKILL) -> None:
    """Send a signal to those that are still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def parents() -> dict[int, int]:
    """Parent of each process that has not ended; a zombie waits for its own parent alone."""
    found = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, parent = Path(entry.path, "stat").read_text().rpartition(")")[2].split()[:2]
                if state not in "ZX":
                    found[int(entry.name)] = int(parent)
    return found


def environ(pid: int) -> list[bytes]:
    """The environment that a process was started with; empty when it has ended."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def main() -> None:
    session, folder = int(sys.argv[1]), Path(sys.argv[2])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the session ends this process with SIGKILL
    while os.getppid() == session:
        time.sleep(0.2)
    kill_all(folder)


if __name__ == "__main__":
    main()
