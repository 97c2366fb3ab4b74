"""Probes of a node: space and writing, shared memory, loopback; with the others: clocks, and a folder that all see."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from forge_resilience._shared.limits import limit_problem
from forge_resilience.health.finding import BROKEN, OK, WARN, Finding

_MOST_SECONDS_APART = 2.0
_MIN_FREE_SHM = 64 * 2**20
_SEEN_WITHIN_SECONDS = 10.0  # a folder of NFS shows what others wrote after some seconds
_DATA = b"forge" * 1000
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def disk(folder: str | os.PathLike[str], min_free_bytes: int = 2**30) -> Finding:
    """Write into `folder`, read it back, and look at the space that is left."""
    what, folder = "disk", Path(folder)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(_DATA)
            file.seek(0)
            same = file.read() == _DATA
    except OSError as error:
        full = error.errno in _FULL or limit_problem(error)  # no fault of the node
        value, rule = f"{folder}: {error.strerror}", "the folder must take files"
        fix = "free some space" if full else "make it writable"
        return Finding(what, WARN if full else BROKEN, value, rule, fix)
    if not same:
        value = f"{folder} gave back other bytes than were written"
        return Finding(what, BROKEN, value, "a disk must keep what is written", "look at the disk")
    free = shutil.disk_usage(folder).free
    value = f"{folder}: writable, {free / 2**30:.1f} GiB free"
    if free < min_free_bytes:
        rule = f"{min_free_bytes / 2**30:.1f} GiB should be free"
        fix = "free some space: checkpoints need about 12 bytes per parameter"
        return Finding(what, WARN, value, rule, fix)
    return Finding(what, OK, value)


def shared_memory(folder: str = "/dev/shm") -> Finding:
    """Data workers and NCCL hand over tensors in /dev/shm: it must be writable and have some space."""
    what = "shared memory"
    if not os.path.isdir(folder):
        return Finding(what, WARN, f"there is no {folder}", "", "mount a tmpfs there")
    found = disk(folder, _MIN_FREE_SHM)
    if found.state == OK:
        return Finding(what, OK, found.value)
    fix = "give the container more of it (--shm-size=8g), or remove old files"
    return Finding(what, WARN, found.value, found.rule, fix)


def loopback(timeout_seconds: float = 5.0) -> Finding:
    """A message to ourselves over 127.0.0.1, which local ranks and launchers use."""
    what = "loopback"
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(timeout_seconds)
            with socket.create_connection(server.getsockname(), timeout_seconds) as client:
                peer, _ = server.accept()
                with peer:
                    peer.sendall(b"forge")
                    same = client.recv(5, socket.MSG_WAITALL) == b"forge"
    except OSError as error:
        rule = "127.0.0.1 must take connections"
        state = WARN if limit_problem(error) else BROKEN
        return Finding(what, state, f"127.0.0.1: {error}", rule, "bring up the interface lo")

    if not same:
        return Finding(what, BROKEN, "127.0.0.1 lost a message", "", "bring up the interface lo")
    return Finding(what, OK, "127.0.0.1 answers")


def clocks(times: Sequence[float]) -> list[Finding]:
    """The clock of each rank, read at the same moment, against the median of all (Unix seconds)."""
    middle = sorted(times)[(len(times) - 1) // 2]
    found = []
    for at in times:
        ahead = at - middle
        value = f"{abs(ahead):.1f} s {'behind' if ahead < 0 else 'ahead of'} the others"
        if abs(ahead) <= _MOST_SECONDS_APART:
            found.append(Finding("clock", OK, value))
            continue
        rule = f"clocks should agree within {_MOST_SECONDS_APART:g} s, or logs and leases mislead"
        found.append(Finding("clock", WARN, value, rule, "start chrony or ntpd there"))
    return found


def write_token(folder: str | os.PathLike[str]) -> str:
    """A new file in `folder` that others are to see; its name. OSError if it cannot be written."""
    path = Path(folder) / f".forge-health-{secrets.token_hex(6)}"
    path.write_bytes(_DATA)
    return path.name


def sees_token(
    folder: str | os.PathLike[str], name: str, seconds: float = _SEEN_WITHIN_SECONDS
) -> bool:
    """Whether this node sees the file that another wrote, at once or within `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            if (Path(folder) / name).read_bytes() == _DATA:
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)  # other nodes' caches of the folder expire


def shared_folder(folder: str, seen: Sequence[bool], nodes: Sequence[str]) -> list[Finding]:
    """For each rank, whether its node sees the file that the first rank wrote into `folder`.

    A node that does not is broken while another node besides the first does: it has lost the file system.
    Where no other does, the folder is on a disk of the first node alone, and all others say so.
    """
    elsewhere = [saw for saw, node in zip(seen, nodes) if node != nodes[0]]
    local = bool(elsewhere) and not any(elsewhere)
    found = []
    for saw in seen:
        if saw:
            found.append(
                Finding("shared folder", OK, f"{folder} is the same as that of {nodes[0]}")
            )
            continue
        value, rule = (
            f"{folder} is not that of {nodes[0]}",
            "all nodes must see the folder of the run",
        )
        fix = "mount its file system there, or leave the node out"
        if local:
            fix = "it seems to be on a local disk: choose one that all nodes share"
        found.append(Finding("shared folder", BROKEN, value, rule, fix))
    return found
