"""What Linux tells of processes in /proc; elsewhere, and of one that has ended, nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Container


def pids() -> list[int]:
    """All processes of this host that this one sees."""
    with contextlib.suppress(OSError):
        return sorted(int(name) for name in os.listdir("/proc") if name.isdecimal())
    return []


def read(pid: int, name: str) -> bytes:
    """The content of /proc/PID/NAME."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read()
    return b""


def stat(pid: int) -> list[str]:
    """Fields of `stat` after the name: 0 is the state, 1 the parent, 3 the session, 19 the start in ticks since boot."""
    return read(pid, "stat").rpartition(b")")[2].decode().split()


def status(pid: int) -> dict[str, str]:
    """The lines of `status`."""
    lines = read(pid, "status").decode(errors="replace").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def environ(pid: int) -> dict[str, str]:
    """The environment that a process was started with."""
    entries = read(pid, "environ").decode(errors="replace").split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def process_start(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0 if there is none, and off Linux."""
    fields = stat(pid)
    return int(fields[19]) if fields else 0


def descendants(pid: int, keep: Container[int] = ()) -> dict[int, str]:
    """Pid -> state (a letter of `stat`) of the processes below `pid`, nearest first, without those in `keep` and below.

    Costs a read for each process of this host.
    """
    children: dict[int, list[tuple[int, str]]] = {}
    for child in pids():
        fields = stat(child)
        if fields:
            children.setdefault(int(fields[1]), []).append((child, fields[0]))

    found: dict[int, str] = {}
    level = [pid]
    while level:
        below = [
            child for parent in level for child in children.get(parent, ()) if child[0] not in keep
        ]
        found.update(below)
        level = [child for child, _ in below]
    return found
