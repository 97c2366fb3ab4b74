"""A command under faults: start it, strike it, start it again, until all faults struck and it ends by itself."""

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
from typing import Any

from forge_resilience.chaos.files import damage
from forge_resilience.chaos.processes import PROCESS_KINDS, marked, rank_pids, send
from forge_resilience.chaos.schedule import BETWEEN, FIRST, Fault
from forge_resilience.chaos.strike import Striker, Struck
from forge_resilience.heartbeat import FOLDER, read_heartbeats

_MARK = "FORGE_CHAOS_LIFE"
_MAX_TRIES = 5
_ORPHAN_SECONDS = 15.0  # that processes of a life may take to follow its command


class CommandLife:
    """One run of a command, its output appended to a file."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], output: Path) -> None:
        self._mark = secrets.token_hex(8)
        with output.open("ab") as log:
            self._process = subprocess.Popen(
                list(command), env={**environ, _MARK: self._mark}, stdout=log, stderr=log
            )
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
class Result:
    """What a fault did, as JSON.

    struck: whether it met its phase. code: how the life ended that it struck, None if it went on. orphans: of that
    life. recovery_seconds: from the strike to a step beyond the struck one, or to the end with 0; None without.
    problem: why this is a failure, "" for none.
    """

    fault: Fault
    struck: Struck | None
    code: int | None = None
    orphans: int = 0
    recovery_seconds: float | None = None
    problem: str = ""

    @property
    def row(self) -> dict[str, Any]:
        """Plain data for one line of JSON."""
        where = asdict(self.struck) if self.struck else {}
        where.pop("time", None)
        own = {key: value for key, value in asdict(self).items() if key not in ("fault", "struck")}
        return {**asdict(self.fault), "struck": self.struck is not None, **where, **own}


class Trial:
    """Lives of a command, one after another.

    codes: exit codes that a struck life may end with (negative: a signal). limit_seconds: for a life to end once it
    was struck, and for a strike to meet its phase; a life that does not end is a problem, and is killed.
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
        self._striker = Striker(self._folder / "beats")
        self._life: CommandLife | None = None

    def run(self, faults: Sequence[Fault]) -> Iterator[Result]:
        """Strike with each fault in turn, then let the command end; a command that ended early ends the trial.

        The last result is that of the last life: `struck` None, `problem` if it did not end with 0.
        """
        try:
            queue = [(fault, 0) for fault in faults]
            while queue:
                fault, tries = queue.pop(0)
                result = self._strike(fault)
                if result is None and self._start().poll() is not None:  # it has ended by itself
                    break
                if result is None:  # missed: it does not count, and is repeated
                    queue += [(fault, tries + 1)] * (tries < _MAX_TRIES)
                    continue
                ended = result.code is not None and not result.problem
                yield self._recover(result) if ended else result
            yield self._finish()
        finally:
            self._end()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> CommandLife:
        if self._life is None:
            shutil.rmtree(self._striker.folder, ignore_errors=True)
            self._striker.folder.mkdir()
            environ = {**os.environ, FOLDER: str(self._striker.folder)}
            self._life = CommandLife(self._command, environ, self._output)
        return self._life

    def _strike(self, fault: Fault) -> Result | None:
        """None if the fault did not meet its phase: missed, or the command ended with 0 before."""
        if fault.phase == BETWEEN:
            return self._damage(fault)
        if fault.phase in FIRST:  # only a new life has it; this one ends uncounted
            self._end()
        life, kind = self._start(), PROCESS_KINDS[fault.kind]
        struck = self._striker.strike(life, fault, kind, self._limit)
        if struck is None:
            code = life.poll()
            if code == 0 or (code is None and fault.phase in FIRST):
                return None
            return Result(fault, None, code, problem=self._close(f"never came into phase {fault.phase}"))  # fmt: skip
        if not kind.ends:
            return Result(fault, struck)
        code = self._wait(life)
        orphans = self._orphans(life)
        problem = ""
        if code is None:
            problem = f"did not end within {self._limit:g} s"
        elif self._codes is not None and code not in self._codes:
            problem = f"ended with {code}"
        elif orphans:
            problem = f"left {orphans} processes behind"
        self._end()
        return Result(fault, struck, code, orphans, problem=problem)

    def _damage(self, fault: Fault) -> Result:
        """Damage one of the files, of a life that was killed for it."""
        if self._life is not None:
            self._end()
        files = sorted(self._files())
        if not files:
            return Result(fault, None, problem="no file to damage yet")
        damage(fault.kind, random.Random(fault.seed).choice(files), fault.seed)
        return Result(fault, Struck(BETWEEN, None, fault.rank, 0, time.monotonic()), 0)

    def _recover(self, result: Result) -> Result:
        """Start again, and wait for a step beyond the struck one."""
        assert result.struck is not None
        life, before = self._start(), result.struck
        deadline = time.monotonic() + self._limit
        while time.monotonic() < deadline:
            steps = [beat.step for beat in read_heartbeats(self._striker.folder) if beat.step]
            beyond = bool(steps) and max(steps) > (before.step or 0)
            if beyond or life.poll() == 0:
                return replace(result, recovery_seconds=round(time.monotonic() - before.time, 3))
            if life.poll() is not None:
                return replace(result, problem=self._close(f"ended with {life.poll()} at the restart"))  # fmt: skip
            time.sleep(0.01)  # polling processes
        return replace(
            result, problem=self._close(f"made no progress in {self._limit:g} s after the restart")
        )

    def _finish(self) -> Result:
        life = self._start()
        code, nothing = self._wait(life), Fault(-1, "none", "exit", 0, 0, 0.0, 0)
        problem = "" if code == 0 else f"ended with {code} undisturbed"
        return Result(nothing, None, code, self._orphans(life), problem=problem)

    def _wait(self, life: CommandLife) -> int | None:
        deadline = time.monotonic() + self._limit
        while life.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)  # polling a process
        return life.poll()

    def _orphans(self, life: CommandLife) -> int:
        deadline = time.monotonic() + _ORPHAN_SECONDS
        while (living := life.living()) and time.monotonic() < deadline:
            time.sleep(0.02)  # polling processes
        return len(living)

    def _close(self, problem: str) -> str:
        self._end()
        return problem

    def _end(self) -> None:
        """Kill what is left of the life."""
        if self._life is None:
            return
        for pid in [self._life.pid, *self._life.living()]:
            send(pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._life._process.wait(10)
        self._life = None
