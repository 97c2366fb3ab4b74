"""Faults of processes, from outside: signals to ranks, to all of them, to the command that started them."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from forge_resilience import _proc

_STORM = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
_Pids = Mapping[int, int]


class ProcessKind(NamedTuple):
    """`strike(launcher, pids of ranks, rank, seed)` is called while the rank is stopped.

    ends: whether the life is expected to end by it. stays: whether the rank stays stopped.
    """

    strike: Callable[[int, _Pids, int, int], None]
    ends: bool = True
    stays: bool = False


def send(pid: int, number: int) -> None:
    """Send a signal; nothing if the process is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _to_rank(number: int) -> ProcessKind:
    return ProcessKind(lambda launcher, pids, rank, seed: send(pids[rank], number))


def _to_launcher(number: int) -> ProcessKind:
    return ProcessKind(lambda launcher, pids, rank, seed: send(launcher, number))


def _kill_all(launcher: int, pids: _Pids, rank: int, seed: int) -> None:
    for pid in pids.values():
        send(pid, signal.SIGKILL)


def _pause(launcher: int, pids: _Pids, rank: int, seed: int) -> None:
    send(pids[rank], signal.SIGSTOP)
    time.sleep(random.Random(seed).uniform(0.2, 3.0))
    send(pids[rank], signal.SIGCONT)


def _slow(launcher: int, pids: _Pids, rank: int, seed: int) -> None:
    """A third of the speed for a second: stopped 20 of 30 ms."""
    for _ in range(33):
        send(pids[rank], signal.SIGSTOP)
        time.sleep(0.02)
        send(pids[rank], signal.SIGCONT)
        time.sleep(0.01)


def _term_then_kill(launcher: int, pids: _Pids, rank: int, seed: int) -> None:
    """A grace shorter than a save."""
    for pid in pids.values():
        send(pid, signal.SIGTERM)
        send(pid, signal.SIGCONT)
    time.sleep(random.Random(seed).uniform(0.0, 0.02))
    _kill_all(launcher, pids, rank, seed)


def _storm(launcher: int, pids: _Pids, rank: int, seed: int) -> None:
    """1,000 signals that ask for a stop, mixed, to the command and to all ranks, within two seconds."""
    draw, targets = random.Random(seed), [launcher, *pids.values()]
    begin = time.monotonic()
    for number in range(1000):
        send(draw.choice(targets), draw.choice(_STORM))
        for pid in pids.values():
            send(pid, signal.SIGCONT)
        time.sleep(max(0.0, begin + number * 0.0019 - time.monotonic()))


#: Faults of processes by name. "rank" is drawn by the schedule, "launcher" is the command itself.
PROCESS_KINDS: dict[str, ProcessKind] = {
    "kill_rank": _to_rank(signal.SIGKILL),
    "kill_all": ProcessKind(_kill_all),
    "kill_launcher": _to_launcher(signal.SIGKILL),
    "segfault": _to_rank(signal.SIGSEGV),
    "abort": _to_rank(signal.SIGABRT),
    "pause": ProcessKind(_pause, ends=False),
    "slow": ProcessKind(_slow, ends=False),
    "freeze": ProcessKind(lambda launcher, pids, rank, seed: None, stays=True),
    "term": _to_launcher(signal.SIGTERM),
    "term_rank": _to_rank(signal.SIGTERM),
    "usr1": _to_launcher(signal.SIGUSR1),
    "usr1_rank": _to_rank(signal.SIGUSR1),
    "int": _to_launcher(signal.SIGINT),
    "hup": _to_launcher(signal.SIGHUP),
    "term_then_kill": ProcessKind(_term_then_kill),
    "storm": ProcessKind(_storm),
}


def rank_pids(launcher: int) -> dict[int, int]:
    """Rank -> pid of the processes with RANK, or SLURM_PROCID, nearest to a launcher; of a launcher without any
    itself as rank 0."""
    found: dict[int, int] = {}
    for pid in _proc.descendants(launcher):
        variables = _proc.environ(pid)
        rank = variables.get("RANK", variables.get("SLURM_PROCID", ""))
        if rank.isdecimal():
            found.setdefault(int(rank), pid)
    return found or {0: launcher}


def marked(name: str, value: str) -> list[int]:
    """Living processes whose environment says `name=value`: all that a life started, orphans too."""
    entry = f"{name}={value}".encode()
    return [pid for pid in _proc.pids() if entry in _proc.read(pid, "environ").split(b"\0")]


def state_of(pid: int) -> str:
    """The letter of /proc: T for a stopped process, Z for one that ended, "" for none."""
    return next(iter(_proc.stat(pid)), "")
