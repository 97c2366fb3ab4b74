"""Faults that are injected: of processes, by signals from outside; of storage, seeded damage between two attempts."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from forge_resilience import procfs
from forge_resilience._shared.problems import invalid

_STORM = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
_Pids = Mapping[int, int]
_PAGE = 4096


class ProcessKind(NamedTuple):
    """A fault of processes: `inject(launcher, pids of ranks, rank, seed)` is called while the rank is stopped.

    ends: whether the attempt is expected to end by it. stays: whether the rank stays stopped.
    """

    inject: Callable[[int, _Pids, int, int], None]
    ends: bool = True
    stays: bool = False


def _signal_rank(number: int) -> ProcessKind:
    return ProcessKind(lambda launcher, pids, rank, seed: procfs.send(pids[rank], number))


def _signal_launcher(number: int) -> ProcessKind:
    return ProcessKind(lambda launcher, pids, rank, seed: procfs.send(launcher, number))


def _kill_all(launcher: int, pids: _Pids, rank: int, seed: int) -> None:
    for pid in pids.values():
        procfs.send(pid, signal.SIGKILL)


def _pause(launcher: int, pids: _Pids, rank: int, seed: int) -> None:
    procfs.send(pids[rank], signal.SIGSTOP)
    time.sleep(random.Random(seed).uniform(0.2, 3.0))
    procfs.send(pids[rank], signal.SIGCONT)


def _slow(launcher: int, pids: _Pids, rank: int, seed: int) -> None:
    """Slow the rank to a third for a second: it is stopped 20 of 30 ms."""
    for _ in range(33):
        procfs.send(pids[rank], signal.SIGSTOP)
        time.sleep(0.02)
        procfs.send(pids[rank], signal.SIGCONT)
        time.sleep(0.01)


def _term_then_kill(launcher: int, pids: _Pids, rank: int, seed: int) -> None:
    """TERM, then KILL after a grace shorter than a save."""
    for pid in pids.values():
        procfs.send(pid, signal.SIGTERM)
        procfs.send(pid, signal.SIGCONT)
    time.sleep(random.Random(seed).uniform(0.0, 0.02))
    _kill_all(launcher, pids, rank, seed)


def _storm(launcher: int, pids: _Pids, rank: int, seed: int) -> None:
    """Send 1,000 mixed stop signals to the command and all ranks within two seconds."""
    draw, targets = random.Random(seed), [launcher, *pids.values()]
    begin = time.monotonic()
    for number in range(1000):
        procfs.send(draw.choice(targets), draw.choice(_STORM))
        for pid in pids.values():
            procfs.send(pid, signal.SIGCONT)
        time.sleep(max(0.0, begin + number * 0.0019 - time.monotonic()))


#: Faults of processes by name. "rank" is one that the schedule draws, so that a seed repeats it; "launcher" is the
#: command itself.
PROCESS_KINDS: dict[str, ProcessKind] = {
    "kill_rank": _signal_rank(signal.SIGKILL),
    "kill_all": ProcessKind(_kill_all),
    "kill_launcher": _signal_launcher(signal.SIGKILL),
    "segfault": _signal_rank(signal.SIGSEGV),
    "abort": _signal_rank(signal.SIGABRT),
    "pause": ProcessKind(_pause, ends=False),
    "slow": ProcessKind(_slow, ends=False),
    "freeze": ProcessKind(lambda launcher, pids, rank, seed: None, stays=True),
    "term": _signal_launcher(signal.SIGTERM),
    "term_rank": _signal_rank(signal.SIGTERM),
    "usr1": _signal_launcher(signal.SIGUSR1),
    "usr1_rank": _signal_rank(signal.SIGUSR1),
    "int": _signal_launcher(signal.SIGINT),
    "hup": _signal_launcher(signal.SIGHUP),
    "term_then_kill": ProcessKind(_term_then_kill),
    "storm": ProcessKind(_storm),
}


def rank_pids(launcher: int) -> dict[int, int]:
    """Return rank -> pid of the processes with RANK, or SLURM_PROCID, nearest to a launcher; {0: launcher} if it has
    none."""
    found: dict[int, int] = {}
    for pid in procfs.descendants(launcher):
        variables = procfs.environ(pid)
        rank = variables.get("RANK", variables.get("SLURM_PROCID", ""))
        if rank.isdecimal():
            found.setdefault(int(rank), pid)
    return found or {0: launcher}


def marked(name: str, value: str) -> list[int]:
    """Return the living processes with `name=value` in their environment: all that an attempt started, orphans too."""
    entry = f"{name}={value}".encode()
    return [pid for pid in procfs.pids() if entry in procfs.read(pid, "environ").split(b"\0")]


# ---- storage


def _flip_bit(path: Path, draw: random.Random) -> None:
    _overwrite(path, draw.randrange(_size(path)), lambda old: bytes([old[0] ^ 1 << draw.randrange(8)]))  # fmt: skip


def _zero_page(path: Path, draw: random.Random) -> None:
    page = draw.randrange(_size(path)) // _PAGE
    _overwrite(path, page * _PAGE, lambda old: bytes(len(old)), _PAGE)


def _truncate(path: Path, draw: random.Random) -> None:
    os.truncate(path, draw.randrange(_size(path)))


def _swap(path: Path, draw: random.Random) -> None:
    """Replace the file by that of a sibling folder, as a lost write or a wrong copy would."""
    folders = sorted(f for f in path.parent.parent.iterdir() if f != path.parent)
    others = [f / path.name for f in folders if (f / path.name).exists()]
    if not others:
        rule = f"no folder next to {path.parent} holds another {path.name}"
        raise FileNotFoundError(f"{rule}; save twice first")
    path.write_bytes(draw.choice(others).read_bytes())


def _wrong_json(path: Path, draw: random.Random) -> None:
    path.write_text('{"version": [], "files": 3}')


def _link_outside(path: Path, draw: random.Random) -> None:
    path.unlink()
    path.symlink_to("/etc/hostname")


def _fifo(path: Path, draw: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def _clock(path: Path, draw: random.Random) -> None:
    """Move the times of the folder and all files in it by a day, either way."""
    moved = time.time() + draw.choice([-86_400, 86_400])
    for found in [path.parent, *path.parent.iterdir()]:
        os.utime(found, (moved, moved))


def _stale_folders(path: Path, draw: random.Random) -> None:
    """Make 100 temporary folders as killed saves leave them, each with a file."""
    for number in range(100):
        stale = path.parent.with_name(f"{path.parent.name}.tmp-{draw.getrandbits(32):08x}-{number}")
        stale.mkdir()
        shutil.copy(path, stale)


def _dangling_latest(path: Path, draw: random.Random) -> None:
    """Link `latest` next to the folder to nothing, to itself, or outside."""
    latest = path.parent.with_name("latest")
    latest.unlink(missing_ok=True)
    latest.symlink_to(draw.choice(["nowhere", "latest", "/etc"]))


#: Faults of storage by name: `kind(path, random)` draws from `random`, so that a seed repeats the damage. A fault of
#: one file may also hit the folder that holds it.
FILE_KINDS: dict[str, Callable[[Path, random.Random], None]] = {
    "flip_bit": _flip_bit,
    "zero_page": _zero_page,
    "truncate": _truncate,
    "remove": lambda path, draw: path.unlink(),
    "empty": lambda path, draw: os.truncate(path, 0),
    "swap": _swap,
    "wrong_json": _wrong_json,
    "link_outside": _link_outside,
    "fifo": _fifo,
    "remove_folder": lambda path, draw: shutil.rmtree(path.parent),
    "clock": _clock,
    "stale_folders": _stale_folders,
    "dangling_latest": _dangling_latest,
}


def damage(kind: str, path: Path, seed: int) -> None:
    """Inject `kind` of FILE_KINDS into a file; the same seed does the same. ValueError for an unknown kind or an empty file."""
    if kind not in FILE_KINDS:
        raise invalid("kind", "unknown", kind, f"must be one of {', '.join(FILE_KINDS)}")
    FILE_KINDS[kind](path, random.Random(seed))


def _overwrite(path: Path, at: int, change: Callable[[bytes], bytes], length: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        new = change(file.read(length))
        file.seek(at)
        file.write(new)


def _size(path: Path) -> int:
    size = path.stat().st_size
    if size == 0:
        raise invalid("", "empty", ..., "has 0 bytes", "choose a file with content", where=path)
    return size
