"""A command under faults: start it, inject a fault in a named phase, start it again, until it ends by itself.

The rank is watched through its heartbeat. In the planned entry of the phase it is stopped (SIGSTOP), its heartbeat is read
again, and only if it is still in that phase the fault is injected: a stopped process cannot leave a phase. After a miss it
continues, and the next entry is tried.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from forge_resilience import procfs
from forge_resilience._renamed import renamed
from forge_resilience.chaos.faults import PROCESS_KINDS, ProcessKind, damage, marked, rank_pids
from forge_resilience.chaos.schedule import BETWEEN, FIRST, Fault
from forge_resilience.heartbeat import FOLDER, HeartbeatRecord, read_heartbeats

ASYNC_SAVE = "async_save"
_POLL_SECONDS = 0.0002  # half a millisecond would miss phases
# assumed, because a fault in a start is timed before the first heartbeat can be seen
_START_SECONDS = 3.0
_MARK = "FORGE_CHAOS_LIFE"
_MAX_TRIES = 5
# for processes of an attempt to follow its command; those that live longer count as orphans
_ORPHAN_SECONDS = 15.0


class Life(Protocol):
    """Protocol of one attempt: a command that was started."""

    pid: int

    def poll(self) -> int | None:
        """Its exit code once it has ended, as of subprocess."""

    def ranks(self) -> Mapping[int, int]:
        """Rank -> pid of those that run."""

    def living(self) -> list[int]:
        """All processes that it started, at any depth, and that still run; orphans too."""


class CommandLife:
    """One run of a command, its output appended to a file."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], output: Path) -> None:
        self._mark = secrets.token_hex(8)
        own = {**environ, _MARK: self._mark}
        with output.open("ab") as log:
            self._process = subprocess.Popen(list(command), env=own, stdout=log, stderr=log)
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def ranks(self) -> Mapping[int, int]:
        """Rank -> pid."""
        return rank_pids(self.pid)

    def living(self) -> list[int]:
        """All processes that it started, orphans too."""
        return [pid for pid in marked(_MARK, self._mark) if pid != self.pid]


@dataclass(frozen=True)
class Injection:
    """Where a fault was injected: step of the rank in its phase, None before the first; misses before."""

    phase: str
    step: int | None
    rank: int
    misses: int
    time: float


class Injector:
    """Injects faults into attempts whose ranks write heartbeats into `folder`, which the caller empties before each attempt."""

    def __init__(self, folder: Path, start_seconds: float = _START_SECONDS) -> None:
        self.folder = folder
        # seconds of the last time of each phase, so that a fault can wait for a fraction of it
        self.durations = {"start": start_seconds}

    def inject(
        self, life: Life, fault: Fault, kind: ProcessKind, timeout_seconds: float = 60.0
    ) -> Injection | None:
        """Inject `kind` into a rank in the fault's phase; None if the attempt, the time, or a phase that comes once ended before."""
        deadline, misses = time.monotonic() + timeout_seconds, 0
        entry, seen, begun = fault.entry, 0, 0.0
        last: tuple[str, int] | None = None
        if fault.phase == "start":
            time.sleep(fault.fraction * self.durations["start"])

        while time.monotonic() < deadline and life.poll() is None:
            heartbeat = self._heartbeat(fault.rank)
            now = (_phase_of(heartbeat, fault.phase), 0 if heartbeat is None else heartbeat.entries)
            if now != last:
                if last is not None and last[0] == fault.phase and fault.phase != "start":
                    self.durations[fault.phase] = time.monotonic() - begun
                seen += now[0] == fault.phase
                last, begun = now, time.monotonic()

            if fault.phase in FIRST and heartbeat is not None and heartbeat.phase not in FIRST:
                return None  # the phase comes once, so waiting longer would be in vain
            if now[0] != fault.phase or (seen < entry and fault.phase != "start"):
                time.sleep(_POLL_SECONDS)
                continue
            if fault.phase != "start":
                # the planned fraction of the last time; less after each miss, as the phase had ended before it
                fraction = fault.fraction / (1 + misses)
                time.sleep(fraction * min(1.0, self.durations.get(fault.phase, 0.0)))

            pid = life.ranks().get(fault.rank) if heartbeat is None else heartbeat.pid
            if pid is None:
                time.sleep(_POLL_SECONDS)
                continue
            injection = self._inject_if_in_phase(life, fault, kind, pid, misses)
            if injection is not None:
                return injection
            misses, entry = misses + 1, seen + 1
        return None

    def _inject_if_in_phase(
        self, life: Life, fault: Fault, kind: ProcessKind, pid: int, misses: int
    ) -> Injection | None:
        """Stop the rank, and inject the fault if it is still in the phase; None for a miss."""
        procfs.send(pid, signal.SIGSTOP)
        stopped = time.monotonic() + 0.1
        while procfs.state(pid)[0] not in "TXZ" and time.monotonic() < stopped:
            pass
        heartbeat = self._heartbeat(fault.rank)
        is_stopped = procfs.state(pid)[0] == "T"
        there = is_stopped and _phase_of(heartbeat, fault.phase) == fault.phase
        if there:
            step = None if heartbeat is None else heartbeat.step
            pids = {**life.ranks(), fault.rank: pid}
            at = time.monotonic()
            kind.inject(life.pid, pids, fault.rank, fault.seed)
        if not there or not kind.stays:
            procfs.send(pid, signal.SIGCONT)
        return Injection(fault.phase, step, fault.rank, misses, at) if there else None

    def _heartbeat(self, rank: int) -> HeartbeatRecord | None:
        return next((found for found in read_heartbeats(self.folder) if found.rank == rank), None)


def _phase_of(heartbeat: HeartbeatRecord | None, wanted: str) -> str:
    if heartbeat is None:
        return "start"
    saves = wanted == ASYNC_SAVE and heartbeat.background == "save"
    return wanted if saves else heartbeat.phase


@dataclass(frozen=True)
class Result:
    """The effect of a fault: how the attempt ended and recovered.

    injection: None if it missed its phase. code: how the attempt with the fault ended, None if it went on. orphans: of that
    attempt. recovery_seconds: from the injection to a step beyond its step, or to the end with 0; None without.
    problem: why this is a failure, "" for none.
    """

    fault: Fault
    injection: Injection | None
    code: int | None = None
    orphans: int = 0
    recovery_seconds: float | None = None
    problem: str = ""

    @property
    def row(self) -> dict[str, Any]:
        """The result as one line of JSON has it."""
        row = asdict(self)
        fault, where = row.pop("fault"), row.pop("injection") or {}
        where.pop("time", None)
        fault["struck"] = self.injection is not None  # language: format of a report
        return {**fault, **where, **row}


class Trial:
    """Attempts of a command, one after another.

    codes: exit codes that an attempt with a fault may end with (negative: a signal). limit_seconds: for an attempt to end
    after a fault, and for a fault to meet its phase; an attempt that does not end is a problem, and is killed.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        output: Path,
        files: Callable[[], Sequence[Path]] = list,
        codes: Sequence[int] | None = None,
        limit_seconds: float = 120.0,
    ) -> None:
        self._command, self._output, self._files = list(command), output, files
        self._codes, self._limit = codes, limit_seconds
        self._folder = Path(tempfile.mkdtemp(prefix="forge-chaos-"))
        self._injector = Injector(self._folder / "heartbeats")
        self._life: CommandLife | None = None

    def run(self, faults: Sequence[Fault]) -> Iterator[Result]:
        """Inject each fault in turn, then let the command end; a command that ended early ends the trial.

        The last result is that of the last attempt: `injection` None, `problem` if it did not end with 0.
        """
        try:
            queue = [(fault, 0) for fault in faults]
            while queue:
                fault, tries = queue.pop(0)
                result = self._inject(fault)
                # it has ended by itself, so no fault can be injected any more
                if result is None and self._start().poll() is not None:
                    break
                if result is None:  # missed: not counted, and repeated up to _MAX_TRIES times
                    queue += [(fault, tries + 1)] * (tries < _MAX_TRIES)
                    continue

                ended = result.code is not None and not result.problem
                yield self._recover(result) if ended else result
            yield self._finish()
        finally:
            self._end()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> CommandLife:
        """The running attempt; a new one if it has ended."""
        if self._life is None:
            shutil.rmtree(self._injector.folder, ignore_errors=True)
            self._injector.folder.mkdir()
            environ = {**os.environ, FOLDER: str(self._injector.folder)}
            self._life = CommandLife(self._command, environ, self._output)
        return self._life

    def _inject(self, fault: Fault) -> Result | None:
        """Inject a fault; None if it missed its phase or the command ended with 0 before."""
        if fault.phase == BETWEEN:
            return self._damage(fault)
        if fault.phase in FIRST:  # only a new attempt has it; this one ends uncounted
            self._end()

        life, kind = self._start(), PROCESS_KINDS[fault.kind]
        injection = self._injector.inject(life, fault, kind, self._limit)
        if injection is None:
            code = life.poll()
            if code == 0 or (code is None and fault.phase in FIRST):
                return None
            self._end()
            return Result(fault, None, code, problem=f"never came into phase {fault.phase}")
        if not kind.ends:
            return Result(fault, injection)

        code = self._wait_for_end(life)
        orphans = self._count_orphans(life)
        problem = ""
        if code is None:
            problem = f"did not end within {self._limit:g} s"
        elif self._codes is not None and code not in self._codes:
            problem = f"ended with {code}"
        elif orphans:
            problem = f"left {orphans} processes behind"

        self._end()
        return Result(fault, injection, code, orphans, problem=problem)

    def _damage(self, fault: Fault) -> Result:
        """Damage one of the files, of an attempt that was killed for it."""
        self._end()
        files = sorted(self._files())
        if not files:
            return Result(fault, None, problem="no file to damage yet")
        damage(fault.kind, random.Random(fault.seed).choice(files), fault.seed)
        return Result(fault, Injection(BETWEEN, None, fault.rank, 0, time.monotonic()), 0)

    def _recover(self, result: Result) -> Result:
        """Start again, and wait for a step beyond that of the fault."""
        assert result.injection is not None
        life, before = self._start(), result.injection
        deadline = time.monotonic() + self._limit

        problem = f"made no progress in {self._limit:g} s after the restart"
        while time.monotonic() < deadline:
            steps = [found.step or 0 for found in read_heartbeats(self._injector.folder)]
            if max(steps, default=0) > (before.step or 0) or life.poll() == 0:
                return replace(result, recovery_seconds=round(time.monotonic() - before.time, 3))
            if life.poll() is not None:
                problem = f"ended with {life.poll()} at the restart"
                break
            time.sleep(0.01)  # polling, as nothing reports a new heartbeat
        self._end()
        return replace(result, problem=problem)

    def _finish(self) -> Result:
        """The result of the attempt that ends undisturbed."""
        life = self._start()
        code, nothing = self._wait_for_end(life), Fault(-1, "none", "exit", 0, 0, 0.0, 0)
        problem = "" if code == 0 else f"ended with {code} undisturbed"
        return Result(nothing, None, code, self._count_orphans(life), problem=problem)

    def _wait_for_end(self, life: CommandLife) -> int | None:
        deadline = time.monotonic() + self._limit
        while life.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)  # polling, as `poll` does not wait
        return life.poll()

    def _count_orphans(self, life: CommandLife) -> int:
        """Processes of the attempt that outlive its command."""
        deadline = time.monotonic() + _ORPHAN_SECONDS
        while (living := life.living()) and time.monotonic() < deadline:
            time.sleep(0.02)  # polling, as nothing reports the end of a process that is no child
        return len(living)

    def _end(self) -> None:
        """Kill all processes of the attempt."""
        if self._life is None:
            return
        for pid in [self._life.pid, *self._life.living()]:
            procfs.send(pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._life._process.wait(10)
        self._life = None


__getattr__ = renamed(__name__)
