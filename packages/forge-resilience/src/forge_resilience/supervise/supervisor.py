"""Supervise the ranks of a job on one node: start them, watch them, end them, start them again."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from forge_resilience import procfs
from forge_resilience._shared.locks import locked
from forge_resilience._shared.paths import files_named, open_regular, user_path
from forge_resilience.exit_codes import FINAL_CODES, ExitCode, History, NoRestart, may_restart
from forge_resilience.heartbeat import FOLDER, HeartbeatRecord, read_heartbeats
from forge_resilience.journal import Journal, read_events
from forge_resilience.local_workers import ExitStatus, rank_of, run_workers, words_of
from forge_resilience.stop import StopSignal
from forge_resilience.supervise.hang import Hang, describe_hang
from forge_resilience.supervise.node_slot import NodeSlot, find_node_slot
from forge_resilience.supervise.watch import Late, Watch, WatchConfig

_LOOK_SECONDS = 0.5
_ELSEWHERE_SECONDS = 4.0
#: An attempt without heartbeats and saves that ends within this time has made no progress.
_SHORT_SECONDS = 10.0
_MEMORY = Path("/dev/shm")
_FOLDERS = "forge-heartbeats-"
_OWNER = "FORGE_HEARTBEAT_OWNER"
LIFE = "FORGE_LIFE"
"""Of each rank: how many attempts of the job this supervisor had started before, 0 in the first."""


class Result(int):
    """End of a supervised job: `sys.exit(result.code)`.

    code: the exit code of the job, an `ExitCode` or that of its program.
    attempts: how often its ranks were started, at least 1.
    reason: why it is not started again, and what ended the last attempt; "" after code 0.
    It is the code itself too, as in 0.1; a comparison with a number, or a test of its truth, warns until 0.3.0.
    """

    code: int
    attempts: int
    reason: str

    def __new__(cls, code: int, attempts: int = 1, reason: str = "") -> Result:
        made = super().__new__(cls, code)
        made.code, made.attempts, made.reason = int(code), attempts, reason
        return made

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Result):
            return vars(self) == vars(other)
        _warn_of_number("==")
        return self.code == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __bool__(self) -> bool:
        _warn_of_number("bool()")
        return self.code != 0

    def __hash__(self) -> int:
        return hash(self.code)

    def __repr__(self) -> str:
        return f"Result(code={self.code}, attempts={self.attempts}, reason={self.reason!r})"

    def __reduce__(self) -> Any:
        return Result, (self.code, self.attempts, self.reason)


def _warn_of_number(use: str) -> None:
    text = f"{use} of what supervise() returns: use its code, such as supervise(...).code == 0"
    warnings.warn(text, DeprecationWarning, stacklevel=3)


def supervise(
    command: Sequence[str],
    nproc: int | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    config: WatchConfig | None = None,
    folder: str | os.PathLike[str] | None = None,
    journal: str | os.PathLike[str] | None = None,
    expects_heartbeats: bool = False,
    grace_seconds: float = 10.0,
    guard: int | None = None,
    hand_over_port: bool = False,
) -> Result:
    """Run `command` in `nproc` ranks, watch them by their heartbeats, and start them again; return how the job ended.

        result = supervise([sys.executable, "train.py"], 4, config=WatchConfig("restart", step_seconds=120))
        sys.exit(result.code)

    nproc: ranks of this node; None runs the command once as it is, such as torchrun, or one rank of srun or
    torchrun. environ: as of subprocess. folder: of the heartbeats, else FORGE_HEARTBEAT_DIR, else a new one in
    memory. journal: an events.jsonl that gets `hang`, `stall`, `restart` and `no_progress`; a message with all stacks
    is put next to it. guard: pid of the process that `run_guarded` keeps. hand_over_port: see `local_ranks`.

    A rank that fails, or is late by `config`, ends the others. With `action="restart"`, the default here (that of
    WatchConfig is "report"), all are started again on this node, unless a signal asked for a stop, the code is one of
    FINAL_CODES, other nodes have ranks of the job, or `max_restarts` are used up; a line on stderr says which. Two
    attempts in a row without progress (no step beyond the best one so far, no newer `save` in the journal; of a program
    without both, those that end within 10 s) end with code 70. A hang that is not followed by a restart is code 1, or 75 if a stop had been asked for. What was started below this process meanwhile, and is left running, is ended; after code
    0 what took a session of its own goes on, such as an upload that a callback detached.

    Raises ValueError, RuntimeError and OSError as `run_local_workers` does. Cost: two reads a second for each rank.
    """
    config = config or WatchConfig("restart")
    if journal is not None and user_path(journal).exists():
        # a journal that cannot be opened is an error here, before anything is started
        os.close(open_regular(user_path(journal))[0])
    environ = dict(os.environ if environ is None else environ)

    slot = replace(find_node_slot(nproc, environ), hand_over_port=hand_over_port)

    with _heartbeat_folder(folder or environ.get(FOLDER)) as heartbeats:
        job = _Supervised(
            command=words_of(command),
            slot=slot,
            environ=environ,
            folder=heartbeats,
            config=config,
            journal=None if journal is None else Journal(journal),
            expects_heartbeats=expects_heartbeats,
            grace_seconds=grace_seconds,
            guard=guard,
        )

        procfs.adopt_orphans()
        try:
            return job.run()
        finally:
            procfs.adopt_orphans(False)


@contextlib.contextmanager
def _heartbeat_folder(folder: str | os.PathLike[str] | None) -> Iterator[Path]:
    """The folder of heartbeats: the given one, or a new one in memory; /dev/null if none can be made."""
    if folder is not None:
        folder = user_path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        yield folder.absolute()
        return

    path = Path(os.devnull)  # if no folder can be made, ranks run but are not watched
    with contextlib.ExitStack() as stack:
        for memory in [_MEMORY, None] if os.access(_MEMORY, os.W_OK) else [None]:
            try:
                place = memory or Path(tempfile.gettempdir())
                _remove_stale(place)
                made = Path(tempfile.mkdtemp(prefix=_FOLDERS, dir=place))
                stack.callback(shutil.rmtree, made, ignore_errors=True)
                stack.enter_context(locked(made / "lock"))
                path = made
                break
            except OSError as error:  # no memory or no inodes: no reason to end the job
                _print_line(f"no folder for heartbeats: {error}")
        yield path


def _remove_stale(place: Path) -> None:
    """Remove folders of supervisors that were killed: the kernel has released their locks."""
    for folder in files_named(place, _FOLDERS):
        with contextlib.suppress(OSError):
            if (folder / "lock").exists():  # else another supervisor may be making it
                with locked(folder / "lock"):
                    shutil.rmtree(folder)


@dataclass(kw_only=True)
class _Supervised:
    """The attempts of one job, and how far they came."""

    command: list[str]
    slot: NodeSlot
    environ: dict[str, str]
    folder: Path
    config: WatchConfig
    journal: Journal | None
    expects_heartbeats: bool
    grace_seconds: float
    guard: int | None

    def __post_init__(self) -> None:
        self.environ = self.environ | {FOLDER: str(self.folder)}
        # so that programs that register nothing write stacks, too, when they are aborted
        self.environ.setdefault("PYTHONFAULTHANDLER", "1")
        # with that of an outer rank, ranks here would take no heartbeat file
        self.environ.pop(_OWNER, None)
        self.restarts = 0
        self.best_step = self.best_save = -1
        self.without_progress = 0
        self.hang: Hang | None = None
        self.failed_to_look = False
        self.others = set(procfs.descendants(os.getpid()))  # of the caller: not ours to end

    def run(self) -> Result:
        """Run attempts until one is the last; return how the job ended."""
        # for a signal between attempts, because ranks that run are handed each one
        with StopSignal(announce=False) as stop:
            while True:
                outcome = self._run_attempt()
                grace = 0.0 if self.hang else self.grace_seconds

                done = outcome.code == ExitCode.DONE
                keep = self.others | (procfs.detached() if done else set())
                ended = procfs.end_descendants(grace, keep)
                if ended and done:
                    _print_line(f"ended {ended} processes that the ranks had left running")
                progressed = self._count_progress()
                self.without_progress = 0 if progressed else self.without_progress + 1

                result = self._result_unless_restarted(outcome)
                if result is not None:
                    return result
                if stop.requested:  # the job is to come again
                    reason = f"{stop.signal_name} asked for a stop"
                    _print_line(f"not started again: {reason}")
                    return self._result(ExitCode.REQUEUE, reason)
                self._report_restart(outcome)

    def _run_attempt(self) -> ExitStatus:
        """Start the ranks and wait for their end."""
        self.hang, self.watch = None, Watch(self.config, self.expects_heartbeats)
        self.step = -1
        self.began = time.monotonic()
        off = self.config.action == "off"
        with self.slot.environs(self.environ | {LIFE: str(self.restarts)}) as (environs, store):
            self._remove_old_heartbeats(environs)

            outcome = run_workers(
                self.command,
                environs,
                store=store,
                grace_seconds=self.grace_seconds,
                look=None if off else self._look,
                look_seconds=min(_LOOK_SECONDS, self.config.shortest / 4),
                parent=self.guard,
            )
        self.seconds = time.monotonic() - self.began
        return outcome

    def _remove_old_heartbeats(self, environs: Sequence[Mapping[str, str]]) -> None:
        """Remove heartbeats of an earlier attempt or run; in a shared folder only those of the ranks that start here."""
        names = [f"rank-{rank_of(environ):05d}" for environ in environs]
        for name in ["rank-?????"] if self.slot.has_all_ranks else names:
            for path in [*self.folder.glob(name), *self.folder.glob(f"{name}.stacks")]:
                path.unlink(missing_ok=True)

    # ---- while ranks run

    def _look(self, running: Mapping[int, int], ended: Mapping[int, int]) -> str:
        """Judge the ranks; the cause for which they are to be killed, "" for none."""
        try:
            return self._judge(running, ended)
        except OSError as error:  # no descriptors, no memory: no reason to end the ranks
            if not self.failed_to_look:
                _print_line(f"ranks cannot be watched at the moment: {error}")
            self.failed_to_look = True
        return ""

    def _judge(self, running: Mapping[int, int], ended: Mapping[int, int]) -> str:
        """`_look` without the handling of OSError."""
        heartbeats = read_heartbeats(self.folder)
        procfs.collect_adopted(self.others | set(running.values()))
        mine = [b for b in heartbeats if not b.process_start or procfs.is_below(b.pid, os.getpid())]
        self._note_steps(mine)
        known = {heartbeat.rank: heartbeat.pid for heartbeat in mine}
        ranks = {rank: known.get(rank, pid) for rank, pid in running.items()}
        if known and self.slot.nproc is None and self.slot.has_all_ranks:
            ranks = known  # the command is a launcher, so only heartbeats tell its ranks
        traced = any(procfs.is_traced(pid) for pid in ranks.values())
        late = self.watch.look(mine, ranks, paused=traced)
        return "" if late is None else self._handle_hang(late, ranks, ended)

    def _handle_hang(self, late: Late, ranks: Mapping[int, int], ended: Mapping[int, int]) -> str:
        """Report a late rank with all stacks; return the cause if the ranks are to be killed, else ""."""
        seconds, is_all = self.watch.seconds(), self.slot.has_all_ranks
        hang = describe_hang(self.folder, late, ranks, ended, seconds, self.environ, is_all)
        path = self._write_message(f"{hang.message}\n{hang.stacks}\n")
        _print_line(hang.message if path else f"{hang.message}\n{hang.stacks}")
        if path:
            _print_line(f"stacks of all ranks are in {path}")

        restarts = self.config.action == "restart"
        where = {"rank": hang.rank, "phase": hang.phase, "step": hang.step}
        lost = {"seconds": round(hang.seconds, 3), "seconds_lost": self._seconds_lost()}
        self._record("hang" if restarts else "stall", cause=hang.cause, **where, **lost)
        if not restarts:
            return ""

        self.hang = hang
        for rank, pid in ranks.items():
            if not (self.folder / f"rank-{rank:05d}.stacks").exists():
                procfs.abort(pid)
        # For the stacks that an abort writes; for the other supervisor, which knows the late rank and dies with these.
        time.sleep(_ELSEWHERE_SECONDS if hang.elsewhere else 0.2)
        return hang.cause

    # ---- between attempts

    def _note_steps(self, heartbeats: Iterable[HeartbeatRecord]) -> None:
        """Update the latest step of this attempt."""
        steps = (b.step for b in heartbeats if b.step is not None and b.phase != "start")
        self.step = max((self.step, *steps))

    def _count_progress(self) -> bool:
        """Update the best step and save; return whether this attempt made progress."""
        self._note_steps(read_heartbeats(self.folder))
        step, saves = self.step, [event.get("step") for event in self._events("save")]
        save = max((s for s in saves if isinstance(s, int)), default=-1)
        unknown = step < 0 and save < 0 and self.best_step < 0 and not self.expects_heartbeats
        unknown = unknown and self.seconds >= _SHORT_SECONDS
        progressed = unknown or step > self.best_step or save > self.best_save
        self.best_step, self.best_save = max(step, self.best_step), max(save, self.best_save)
        return progressed

    def _obstacle(self, outcome: ExitStatus) -> str:
        """Why another attempt cannot begin here or would end alike; "" if it may help."""
        reasons = {
            "a signal asked for a stop": outcome.requested,
            f"code {outcome.code} is one of FINAL_CODES": outcome.code in FINAL_CODES,
            f"ranks {outcome.left_behind} cannot be killed": bool(outcome.left_behind),
            f"the action is {self.config.action!r}": self.config.action != "restart",
            "other processes start ranks of the job, too": not self.slot.has_all_ranks,
        }
        return next((reason for reason, holds in reasons.items() if holds), "")

    def _result_unless_restarted(self, outcome: ExitStatus) -> Result | None:
        """Return how the job ended; None if its ranks are to be started again."""
        why, cause, code = self._obstacle(outcome), self._cause(outcome), outcome.code
        history = History(
            may_help=not why,
            restarts=self.restarts,
            max_restarts=self.config.max_restarts,
            without_progress=self.without_progress,
        )
        stop = may_restart(history)

        if stop is None:
            return None
        if stop is NoRestart.NO_PROGRESS:
            why, code = stop.value, int(ExitCode.NO_PROGRESS)
            # a program without heartbeats has no steps
            beyond = f"beyond step {self.best_step}" if self.best_step >= 0 else "and no step"
            _print_line(
                f"{self.without_progress} attempts in a row made no progress {beyond}: ended "
                f"with code {code}; look at the cause of the last one: {outcome.cause}"
            )
            self._record("no_progress", step=self.best_step, cause=outcome.cause, rank=outcome.rank)
        elif code not in FINAL_CODES:  # a final code says by itself why nothing is started again
            why = why or f"{self.restarts} restarts are used up"
            _print_line(f"not started again: {why}; ended with code {code}")
        return self._result(code, "; the last attempt: ".join(filter(None, (why, cause))))

    def _result(self, code: int, reason: str) -> Result:
        return Result(code, self.restarts + 1, "" if code == ExitCode.DONE else reason)

    def _cause(self, outcome: ExitStatus) -> str:
        """What ended this attempt, with its rank; "" if nothing failed."""
        if self.hang is not None:
            return self.hang.cause
        return outcome.cause if outcome.rank is None else f"rank {outcome.rank} {outcome.cause}"

    def _report_restart(self, outcome: ExitStatus) -> None:
        """Count the restart, print it and record it."""
        self.restarts += 1
        cause = self._cause(outcome)
        _print_line(f"restart {self.restarts} of {self.config.max_restarts}: {cause}")

        last = (b for b in read_heartbeats(self.folder) if b.rank == outcome.rank)
        at = self.hang or next(last, None)
        where: dict[str, Any] = {"rank": outcome.rank, "phase": None, "step": None}
        if at is not None:
            where = {"rank": at.rank, "phase": at.phase, "step": at.step}
        lost = self._seconds_lost()
        self._record("restart", cause=cause, **where, life=self.restarts, seconds_lost=lost)

    # ---- what is written down

    def _record(self, event: str, **fields: Any) -> None:
        if self.journal is not None and self.journal.path.parent.is_dir():
            self.journal.record(event, **fields)

    def _write_message(self, text: str) -> Path | None:
        """Write the message next to the journal; None if that fails."""
        if self.journal is not None and self.journal.path.parent.is_dir():
            path = self.journal.path.with_name(f"hang-{datetime.now(UTC):%Y%m%dT%H%M%S}.txt")
            with contextlib.suppress(OSError):  # a full disk: the message is printed instead
                path.write_text(text, encoding="utf-8")
                return path
        return None

    def _seconds_lost(self) -> float:
        """Seconds since the newest save of this attempt, or since its start."""
        lost = time.monotonic() - self.began
        for event in self._events("save"):
            with contextlib.suppress(ValueError, TypeError, KeyError):
                saved = datetime.fromisoformat(event["time"])
                lost = min(lost, (datetime.now(UTC) - saved).total_seconds())
        return round(max(0.0, lost), 3)

    def _events(self, name: str) -> list[dict[str, Any]]:
        """Events of the journal with this name; [] if it cannot be read now."""
        found: list[dict[str, Any]] = []
        with contextlib.suppress(OSError, ValueError):  # it cannot be read now: no reason to end
            if self.journal is not None:
                found += (e for e in read_events(self.journal.path) if e.get("event") == name)
        return found


def _print_line(text: str) -> None:
    with contextlib.suppress(OSError):  # a terminal that is gone must not end the job
        print(f"supervise: {text}", file=sys.stderr, flush=True)
