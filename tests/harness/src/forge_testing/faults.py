"""Seeded harm: to files, and to processes at random instants. The same seed hurts the same place."""

from __future__ import annotations

import os
import random
import select
import signal
import time
from pathlib import Path

_LIMIT_SECONDS = 300.0  # of a machine that is busy with other things


def flip_bit(path: Path, seed: int = 0) -> int:
    """Turn one random bit of a file around, in place; its offset in bits. ValueError if it is empty.

    Usage: `flip_bit(step / "shard-2.bin", seed)`.
    """
    with path.open("r+b") as file:
        size = _size(path)
        bit = random.Random(seed).randrange(8 * size)
        file.seek(bit // 8)
        (old,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([old ^ 1 << bit % 8]))
    return bit


def truncate(path: Path, seed: int = 0) -> int:
    """Cut a file at a random place before its end; its new size. ValueError if it is empty."""
    size = random.Random(seed).randrange(_size(path))
    os.truncate(path, size)
    return size


def signal_at_random(
    pid: int, seed: int, within_seconds: float, sig: int = signal.SIGKILL
) -> float | None:
    """Send `sig` to a process at a random instant of the next `within_seconds`; the seconds waited.

    None if the process was gone by then. It need not be a child. Usage:
    `signal_at_random(process.pid, seed, 2.0)`.
    """
    seconds = random.Random(seed).uniform(0.0, within_seconds)
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        if poll.poll(1000 * seconds):  # readable: it has ended
            return None
        signal.pidfd_send_signal(handle, sig)
    finally:
        os.close(handle)
    return seconds


def signal_rank(launcher: int, rank: int, sig: int = signal.SIGKILL) -> int:
    """Send `sig` to the process of one rank below a launcher (torchrun, --nproc); its pid.

    Waits until the rank exists; TimeoutError after a minute. Usage:
    `signal_rank(process.pid, 2, signal.SIGTERM)`.
    """
    deadline = time.monotonic() + _LIMIT_SECONDS
    while time.monotonic() < deadline:
        pid = rank_pids(launcher).get(rank)
        if pid is not None:
            os.kill(pid, sig)
            return pid
        time.sleep(0.005)  # polling processes
    raise TimeoutError(f"process {launcher} started no rank {rank} in {_LIMIT_SECONDS:g} s")


def rank_pids(launcher: int) -> dict[int, int]:
    """Rank -> pid of the descendants of a process that have RANK in their environment.

    A rank's own children inherit its RANK: the process nearest to the launcher is the rank.
    """
    from forge_resilience import procfs

    found: dict[int, int] = {}
    for pid in procfs.descendants(launcher):
        rank = procfs.environ(pid).get("RANK")
        if rank is not None:
            found.setdefault(int(rank), pid)
    return found


def _size(path: Path) -> int:
    size = path.stat().st_size
    if size == 0:
        raise ValueError(f"{path} has 0 bytes; fill it")
    return size
