"""Heartbeat of a rank: its step and phase in shared memory, for a watcher in another process.

File `rank-00003` (512 bytes, little-endian): 64 bytes of who writes, then two slots of 64 bytes for the main
loop and two for background work. An entry goes into the older slot and ends with a CRC-32, so that one whole
entry can be read at any instant, also after its writer was killed in the middle of the next.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import mmap
import os
import signal
import struct
import sys
import weakref
import zlib
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import IO

from forge_resilience._renamed import renamed
from forge_resilience._shared.paths import files_named, read_regular, user_path
from forge_resilience._shared.problems import ProblemError, invalid
from forge_resilience.procfs import process_start

__all__ = ["FOLDER", "PHASES", "Heartbeat", "HeartbeatRecord", "process_start", "read_heartbeats"]

FOLDER = "FORGE_HEARTBEAT_DIR"
"""Environment variable: the folder of heartbeats, on this host and best in memory. Without it a heartbeat is private
memory."""
PHASES = ("start", "load", "data", "step", "evaluate", "save", "exit")
"""Phases that watchers know limits for; any other name is legal."""
_OWNER = "FORGE_HEARTBEAT_OWNER"  # the pid that took the rank's file; a child that inherits it takes none
_HEAD = struct.Struct("<8sqqQ")  # magic, pid, rank, start of the process, as pids are used again
_MAGIC = b"FORGEHB1"
# number, CLOCK_MONOTONIC because readers on this host have the same clock, step or -1, steps so far, name
_ENTRY = struct.Struct("<QdqI32s")
_SLOT, _SIZE = 64, 512
# where their two slots begin: two, so that one is complete while the other is written
_MAIN, _BACKGROUND = 64, 192
_NO_STEP = -1
_TRIES = 1000


class Heartbeat:
    """Writer of one rank's heartbeat: entries without a lock or a system call.

        heartbeat = Heartbeat.from_environ()
        for step in range(steps):
            heartbeat.enter("data", step)
            batch = next(batches)
            heartbeat.enter("step")
            train(batch)

    `enter` is for one thread, `background` for one other. A child that the process forks goes on in private
    memory and does not write its parent's entries. Cost of an entry: about a microsecond.

    Raises OSError if `folder` cannot be written, ValueError for a name over 32 bytes.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None, rank: int = 0) -> None:
        self._memory: mmap.mmap | bytearray = bytearray(_SIZE)
        self._entries = self._background_entries = 0
        self._step, self._steps = _NO_STEP, 0
        _HEAD.pack_into(self._memory, 0, _MAGIC, os.getpid(), rank, process_start(os.getpid()))
        self.background("")
        self.enter("start")
        if folder is not None:
            self._memory = _create_shared_file(Path(folder) / f"rank-{rank:05d}", self._memory)
            _open_heartbeats.add(self)

    @staticmethod
    def from_environ() -> Heartbeat:
        """Return the heartbeat of this process from its launcher's variables; the same object in each call.

        The file of RANK (else SLURM_PROCID, else 0) in the folder FORGE_HEARTBEAT_DIR. With a folder, SIGUSR2
        writes the stacks of all threads into `rank-00003.stacks` next to it, also while a C call holds the GIL,
        unless the program has a handler of its own. Without a folder, or in a child of the rank: private
        memory, at the same cost.
        """
        rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
        folder = os.environ.get(FOLDER) if rank.isdecimal() else None
        return _heartbeat_of_process(folder, int(rank) if folder else 0, os.getpid())

    def enter(self, phase: str, step: int | None = None) -> None:
        """Enter `phase` of the main loop, in `step` (by default that of the entry before)."""
        if step is not None:
            self._step = step
        if phase == "step":
            self._steps += 1
        self._entries = number = self._entries + 1
        entry = _ENTRY.pack(number, monotonic(), self._step, self._steps, _encode(phase))
        at = _MAIN + _SLOT * (number & 1)
        self._memory[at : at + _SLOT] = entry + zlib.crc32(entry).to_bytes(4, "little")

    def background(self, name: str) -> None:
        """Begin work of another thread (`"save"`), or end it (`""`)."""
        self._background_entries = number = self._background_entries + 1
        entry = _ENTRY.pack(number, monotonic(), _NO_STEP, 0, _encode(name))
        at = _BACKGROUND + _SLOT * (number & 1)
        self._memory[at : at + _SLOT] = entry + zlib.crc32(entry).to_bytes(4, "little")


@dataclass(frozen=True)
class HeartbeatRecord:
    """The newest heartbeat of a rank, and of its background work."""

    rank: int
    pid: int
    process_start: int
    """Tells the process from a later one with its pid: compare it with `process_start(pid)`. 0 off Linux."""
    phase: str
    step: int | None
    seconds: float
    """Since the entry, on a clock that stands still while the machine sleeps."""
    entries: int
    """So far; ranks of one program make the same ones, so the lowest number is that of the late rank."""
    steps: int
    """Times that it entered the phase step: 1 in the first one of its process, which may compile."""
    background: str
    """Background work under way, "" for none."""
    background_seconds: float
    background_entries: int


def read_heartbeats(folder: str | os.PathLike[str]) -> list[HeartbeatRecord]:
    """Read the heartbeats in `folder`, by rank; their processes may have ended.

    A rank without a file is still in its start. Cost: one read of 512 bytes a rank.
    """
    paths = files_named(user_path(folder), "rank-")
    heartbeats = (_read_record(path) for path in paths if len(path.name) == len("rank-00000"))
    return sorted(filter(None, heartbeats), key=lambda heartbeat: heartbeat.rank)


def _read_record(path: Path) -> HeartbeatRecord | None:
    """Read a heartbeat file; None if it is missing or invalid."""
    for _ in range(_TRIES):  # twice overtaken in a row by the writer is rare enough
        try:
            data = read_regular(path, _SIZE)
        except (FileNotFoundError, ProblemError):
            return None
        if len(data) != _SIZE or not data.startswith(_MAGIC):
            return None

        main, background = _newest(data, _MAIN), _newest(data, _BACKGROUND)
        if main is not None and background is not None:
            _, pid, rank, start = _HEAD.unpack_from(data)
            entries, at, step, steps, phase = main
            others, began, _, _, name = background
            seconds, others_seconds = (max(0.0, monotonic() - then) for then in (at, began))
            of_main = (phase, None if step == _NO_STEP else step, seconds, entries, steps)
            return HeartbeatRecord(rank, pid, start, *of_main, name, others_seconds, others)
    return None


def _newest(data: bytes, at: int) -> tuple[int, float, int, int, str] | None:
    """The newer of the two slots at `at` that are complete; None if both are being written."""
    whole = []
    for begin in (at, at + _SLOT):
        entry = data[begin : begin + _ENTRY.size]
        crc = int.from_bytes(data[begin + _ENTRY.size : begin + _SLOT], "little")
        if crc == zlib.crc32(entry):
            *numbers, name = _ENTRY.unpack(entry)
            whole.append((*numbers, name.rstrip(b"\0").decode(errors="replace")))
    return max(whole, default=None)


def _create_shared_file(path: Path, content: bytes | bytearray | mmap.mmap) -> mmap.mmap:
    """`content` as a new file in memory shared with its readers; a file of an earlier attempt is replaced in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    with new.open("w+b") as file:
        # takes the memory now: a full disk is an OSError, not a SIGBUS later
        file.write(bytes(content))
        file.flush()
        memory = mmap.mmap(file.fileno(), _SIZE)
    new.rename(path)
    return memory


@functools.cache
def _encode(name: str) -> bytes:
    text = name.encode()
    if len(text) > 32:
        rule = f"has {len(text)} bytes, the limit is 32"
        raise invalid("phase", "length", name, rule, "shorten it")
    return text


@functools.cache
def _heartbeat_of_process(folder: str | None, rank: int, pid: int) -> Heartbeat:
    """The heartbeat of this process, made once; private memory without a folder."""
    owner = os.environ.get(_OWNER)
    if not folder or (owner is not None and owner != str(pid)):
        return Heartbeat(None, rank)
    try:
        heartbeat = Heartbeat(folder, rank)
        _dump_stacks_on_signal(Path(folder) / f"rank-{rank:05d}.stacks")
    except OSError as error:  # no reason to end a run, which goes on unwatched
        with contextlib.suppress(OSError):
            print(f"rank {rank} has no heartbeat: {error}", file=sys.stderr, flush=True)
        return Heartbeat(None, rank)
    os.environ[_OWNER] = str(pid)
    return heartbeat


@functools.cache  # the file stays open: faulthandler writes to its descriptor
def _dump_stacks_on_signal(path: Path) -> IO[bytes] | None:
    """Let SIGUSR2 write the stacks of all threads, unless the program handles it."""
    if not hasattr(faulthandler, "register") or signal.getsignal(signal.SIGUSR2) != signal.SIG_DFL:
        return None
    file = path.open("wb")
    faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)
    return file


_open_heartbeats: weakref.WeakSet[Heartbeat] = weakref.WeakSet()


def _detach_in_child() -> None:
    """In a forked child: write to private memory, not to the parent's file."""
    for heartbeat in _open_heartbeats:
        heartbeat._memory = bytearray(heartbeat._memory)
    _open_heartbeats.clear()


os.register_at_fork(after_in_child=_detach_in_child)

__getattr__ = renamed(__name__)
