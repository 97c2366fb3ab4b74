"""Strike a rank in a named phase, and know that it was hit there.

The rank is watched through its heartbeat. In the planned entry of the phase it is stopped (SIGSTOP), its heartbeat
is read again, and only if it still stands in that phase the fault is done to it: a stopped process cannot leave a
phase. A miss lets it go on, and the next entry is tried.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from forge_resilience.chaos.processes import ProcessKind, send, state_of
from forge_resilience.chaos.schedule import FIRST, Fault
from forge_resilience.heartbeat import Beat, read_heartbeats

ASYNC_SAVE = "async_save"
_POLL_SECONDS = 0.0002  # half a millisecond would miss phases
_START_SECONDS = 3.0  # of a start that has not been seen yet


class Life(Protocol):
    """A started command."""

    pid: int

    def poll(self) -> int | None:
        """Its exit code once it has ended, as of subprocess."""

    def ranks(self) -> Mapping[int, int]:
        """Rank -> pid of those that run."""

    def living(self) -> list[int]:
        """All processes that it started, at any depth, and that still run; orphans too."""


@dataclass(frozen=True)
class Struck:
    """Where a fault struck: step of the rank in its phase, None before the first; misses before."""

    phase: str
    step: int | None
    rank: int
    misses: int
    time: float


class Striker:
    """Strikes lives whose ranks beat into `folder`, which the caller empties before each life."""

    def __init__(self, folder: Path, start_seconds: float = _START_SECONDS) -> None:
        self.folder = folder
        self.durations = {"start": start_seconds}  # of phases, as seen from outside

    def strike(
        self, life: Life, fault: Fault, kind: ProcessKind, timeout_seconds: float = 60.0
    ) -> Struck | None:
        """Do `kind` to a rank in the fault's phase; None if the life, the time, or a phase that comes once ended before."""
        deadline, misses = time.monotonic() + timeout_seconds, 0
        entry, seen, begun = fault.entry, 0, 0.0
        last: tuple[str, int] | None = None
        if fault.phase == "start":
            time.sleep(fault.fraction * self.durations["start"])
        while time.monotonic() < deadline and life.poll() is None:
            beat = self._beat(fault.rank)
            now = (_phase(beat, fault.phase), 0 if beat is None else beat.entries)
            if now != last:
                if last is not None and last[0] == fault.phase and fault.phase != "start":
                    self.durations[fault.phase] = time.monotonic() - begun
                seen += now[0] == fault.phase and (last is None or now != last)
                last, begun = now, time.monotonic()
            if fault.phase in FIRST and beat is not None and beat.phase not in FIRST:
                return None  # it comes once
            if now[0] != fault.phase or (seen < entry and fault.phase != "start"):
                time.sleep(_POLL_SECONDS)
                continue
            if fault.phase != "start":
                self._wait_into(fault, misses)
            pid = life.ranks().get(fault.rank) if beat is None else beat.pid
            if pid is None:  # not started yet
                time.sleep(_POLL_SECONDS)
                continue
            struck = self._hit(life, fault, kind, pid, misses)
            if struck is not None:
                return struck
            misses, entry = misses + 1, seen + 1
        return None

    def _wait_into(self, fault: Fault, misses: int) -> None:
        """Into the phase by the planned fraction of the time that it took before; less after each miss."""
        share = fault.fraction / (1 + misses)
        time.sleep(share * min(1.0, self.durations.get(fault.phase, 0.0)))

    def _hit(
        self, life: Life, fault: Fault, kind: ProcessKind, pid: int, misses: int
    ) -> Struck | None:
        send(pid, signal.SIGSTOP)
        stopped = time.monotonic() + 0.1
        while state_of(pid) not in ("T", "", "Z") and time.monotonic() < stopped:
            pass
        beat = self._beat(fault.rank)
        there = state_of(pid) == "T" and _phase(beat, fault.phase) == fault.phase
        if there:
            step = None if beat is None else beat.step
            pids = {**life.ranks(), fault.rank: pid}
            at = time.monotonic()
            kind.strike(life.pid, pids, fault.rank, fault.seed)
        if not there or not kind.stays:
            send(pid, signal.SIGCONT)
        return Struck(fault.phase, step, fault.rank, misses, at) if there else None

    def _beat(self, rank: int) -> Beat | None:
        return next((beat for beat in read_heartbeats(self.folder) if beat.rank == rank), None)


def _phase(beat: Beat | None, wanted: str) -> str:
    if beat is None:
        return "start"
    if wanted == ASYNC_SAVE:
        return wanted if beat.background == "save" else beat.phase
    return beat.phase
