"""A small process that keeps one training job in Slurm's queue, on as many nodes as there are: `orchestrate`.

It may be killed at any instant and started again, by Slurm or by hand. What it must not forget is in Slurm's books (all
jobs of a run have one name, of which Slurm runs one at a time) and in a small file that is replaced whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from forge_resilience._shared.atomic import write_file
from forge_resilience._shared.fields import Checked, field
from forge_resilience._shared.paths import user_path
from forge_resilience._shared.problems import invalid
from forge_resilience.exit_codes import ExitCode
from forge_resilience.health import broken_nodes
from forge_resilience.journal import Journal
from forge_resilience.slurm.commands import JobRow, Queue, QueueDown, QueueRefusal

__all__ = ["OrchestratorConfig", "chain_name", "orchestrate"]

#: Ends that are not the job's own doing. A time limit is met when a save took too long.
_LOST = {"NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "TIMEOUT", "DEADLINE", "REVOKED"}
#: Fields of OrchestratorConfig that are flags of `python -m forge_resilience.slurm`.
FLAGS = ("wait_seconds", "grow_after_seconds", "max_resizes_per_hour", "poll_seconds")
_NOW_SECONDS = 5.0  # Slurm's answer "at once" is the time of its last look
_MINUTE = 60.0  # Slurm plans in steps of it
_HOUR = 3600.0
_JOB_IDS = range(2**32 - 2)  # 32 bits, of which the two highest values mean no job


@dataclass(frozen=True)
class OrchestratorConfig(Checked):
    """When a job is submitted at which size, and when it moves to a larger one.

    Raises ValueError with every broken rule. Usage: `OrchestratorConfig(wait_seconds=1800)`.
    """

    wait_seconds: float = field(
        600.0,
        "the largest size that starts within this is taken; else the one that starts first",
        (0, 10**7),
    )
    grow_after_seconds: float = field(
        900.0, "nodes that a larger size needs must be free for so long", (0, 10**7)
    )
    max_resizes_per_hour: int = field(
        2,
        "times per hour that a job is stopped for a larger size, or withdrawn for a smaller one; 0: never",
        (0, 60),
    )
    poll_seconds: float = field(30.0, "seconds between looks at the queue", (0.1, 3600))
    partition: str | None = field(
        None, "partition of the small job that orchestrates (default: that of the job)"
    )
    time_limit: int | str | None = field(
        None, "limit of one life of it: minutes or 'D-HH:MM:SS' (default: that of the partition)"
    )


@dataclass
class _State:
    """What outlives a killed orchestrator, beside Slurm's books.

    handled: the newest job whose end was acted upon. withdrawn: waiting jobs that this orchestrator cancelled itself.
    resizes: times of the last moves to another size. excluded: nodes that were found broken.
    """

    handled: int
    restarts: int = 0
    withdrawn: tuple[int, ...] = ()
    resizes: tuple[float, ...] = ()
    excluded: tuple[str, ...] = ()

    @classmethod
    def of(cls, found: Any) -> _State:
        """The state in a file of any version: other keys are left out. Raises an exception for what is none."""
        lists = {"withdrawn": int, "resizes": float, "excluded": str}
        entries = {name: tuple(map(kind, found.get(name, ()))) for name, kind in lists.items()}
        handled, restarts = int(found["handled"]), int(found.get("restarts", 0))
        if handled not in _JOB_IDS or restarts < 0:
            raise ValueError(f"job {handled} after {restarts} restarts cannot be")
        return cls(handled, restarts, **entries)


def chain_name(run_dir: str | os.PathLike[str]) -> str:
    """The name that all jobs of a run have in the queue: its folder's, and a digest of the whole path."""
    path = os.path.realpath(run_dir)
    return f"{os.path.basename(path)[:40]}-{hashlib.sha256(path.encode()).hexdigest()[:8]}"


def orchestrate(
    script: str | os.PathLike[str],
    sizes: Sequence[int],
    name: str,
    config: OrchestratorConfig | None = None,
    *,
    max_restarts: int = 1000,
    journal: str | os.PathLike[str] | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> int:
    """Keep the job of `script` running on one of `sizes` (numbers of nodes) until it ends; its exit code.

    The script must not continue itself (`SlurmConfig(on_stop="leave")`): it leaves with 75 when it was stopped by USR1,
    TERM or a lost node, and appends a line `<job id> <exit code>` to `ends-<name>` in its folder when it ends, for an
    orchestrator that was away longer than Slurm remembers. 75, Slurm's own ends (node failure, preemption, time limit), and 71 if
    the journal names nodes to leave out, are followed by another submission, at most `max_restarts` times; every other
    code is returned, and 1 for a job that somebody cancelled. What it does is recorded in the journal.
    `stopped` turning true makes it return 75 and leaves the job alone; started again, it finds the job.

    Raises ValueError for sizes or a name that cannot be, QueueRefusal when Slurm refuses the script.
    Cost: a few client commands each `poll_seconds`, no more than a user who looks. Usage:
    `sys.exit(orchestrate("runs/a/slurm/job.sh", [4, 3, 2], chain_name("runs/a")))`.
    """
    script = user_path(script)
    if not sizes or min(sizes) < 1 or len(set(sizes)) < len(sizes):
        rule = "must be different numbers of nodes from 1 on"
        raise invalid("sizes", "range", list(sizes), rule, "use [4, 3, 2]")
    if not script.is_file():
        fix = "write it before"
        raise invalid("script", "not_found", str(script), "must be a batch script", fix)
    config = OrchestratorConfig() if config is None else config
    sizes, queue = sorted(sizes, reverse=True), Queue()
    own = _Orchestrator(script, sizes, name, config, max_restarts, journal, queue)
    while True:
        code = own.look()
        deadline = time.monotonic() + config.poll_seconds
        while code is None and time.monotonic() < deadline:
            if stopped():
                own.say(
                    "stopped; the job goes on, and so does this command when it is started again"
                )
                return int(ExitCode.REQUEUE)
            time.sleep(min(0.5, config.poll_seconds))
        if code is not None:
            return code


class _Orchestrator:
    def __init__(
        self,
        script: Path,
        sizes: Sequence[int],
        name: str,
        config: OrchestratorConfig,
        max_restarts: int,
        journal: str | os.PathLike[str] | None,
        queue: Queue,
    ) -> None:
        self.script, self.sizes, self.name, self.config = script, sizes, name, config
        self.max_restarts, self.journal, self.queue = max_restarts, journal, queue
        self.path = script.parent / f"orchestrator-{name}.json"
        self.state: _State | None = None
        self._seen: tuple[int, str] | None = None  # job and state of the last look, and since when
        self._since = 0.0
        # a larger size that is possible, and since when
        self._free: tuple[int, float] | None = None
        self._reported = 0  # the job whose long wait was reported
        self._is_down = False

    def say(self, text: str, event: str | None = None, **fields: Any) -> None:
        """A line for people, and an event for the journal."""
        with contextlib.suppress(OSError):  # a full disk, or nobody reads it
            print(f"{time.strftime('%FT%T')} forge: {text}", file=sys.stderr, flush=True)
        if event is not None and self.journal is not None:
            Journal(self.journal).record(event, **fields)

    def look(self) -> int | None:
        """One look at the queue, and at most one action; the exit code once all is over."""
        try:
            code = self._look()
        except (QueueDown, OSError) as error:  # decide nothing: the job may well be running
            if not self._is_down:
                self.say(f"no answer of Slurm or of a disk, waiting for it: {error}")
            self._is_down = True
            return None
        self._is_down = False
        return code

    def _look(self) -> int | None:
        rows = self.queue.jobs(self.name)
        live = [row for row in rows if row.is_live]
        ends = [row for row in [*rows, *self._written_ends()] if not row.is_live]
        if self.state is None and (found := self._read()) is not None:
            self.state = found
        elif self.state is None:  # what had ended before the first submission is not of this run
            self._save(_State(handled=max((row.job for row in ends), default=0)))
        for extra in live[
            1:
        ]:  # a submission whose answer was lost; `singleton` has kept it waiting
            self._cancel(extra.job, f"is one too many beside job {live[0].job}")
        if live:
            self._follow(live[0])
            return None
        if ended := [row for row in ends if row.job > self._known.handled]:
            return self._judge(ended[0])
        self._submit()
        return None

    # ---- actions

    def _submit(self) -> None:
        """Ask for the job; whether it was accepted, the next look tells."""
        size = self._choose()
        # lives of all jobs are counted together by the script, against `max_restarts` and no progress
        try:
            job = self.queue.submit(
                self.script, size, self.name, self._known.excluded, {"FORGE_CHAIN": self.name}
            )
        except QueueRefusal as error:
            if not self._known.restarts:
                raise
            self.say(f"{error}; trying again")  # it was accepted before: a limit of the moment
            return
        self.say(f"job {job} submitted on {size} nodes", "submit", job=job, nodes=size)

    def _choose(self) -> int:
        """The largest size that starts within wait_seconds, else the one that starts a minute before larger ones, else the smallest."""
        first: tuple[float, int] | None = None
        for size in self.sizes:
            seconds = self.queue.starts_in(self.script, size, self._known.excluded)
            if seconds is not None and seconds <= self.config.wait_seconds:
                return size
            if seconds is not None and (first is None or seconds < first[0] - _MINUTE):
                first = (seconds, size)
        if first is not None:
            return first[1]
        sizes = ", ".join(map(str, self.sizes))
        self.say(f"none of {sizes} nodes fits what is there now: waiting for {self.sizes[-1]}")
        return self.sizes[-1]

    def _follow(self, row: JobRow) -> None:
        now = time.monotonic()
        if self._seen != (row.job, row.state):
            self._seen, self._since, self._free = (row.job, row.state), now, None
        if row.state == "PENDING" and now - self._since > self.config.wait_seconds:
            if row.job != self._reported:
                self.say(f"job {row.job} still waits for {row.nodes} nodes ({row.reason})")
                self._reported = row.job
            if not row.reason.startswith(("JobHeld", "Dependency")):
                self._withdraw(row)
        elif row.state == "RUNNING":
            self._grow(row, now)

    def _withdraw(self, row: JobRow) -> None:
        """Cancel a job that waits longer than was foretold beside idle nodes that suffice for a smaller size."""
        if not self._may_resize() or self.sizes[-1] >= row.nodes:
            return
        idle = self.queue.idle(row.partition)
        if idle >= self.sizes[-1]:
            self._write(resizes=(*self._recent(), time.time()))
            self._cancel(row.job, f"waits for {row.nodes} nodes while {idle} are idle")

    def _cancel(self, job: int, why: str) -> None:
        """Withdraw a waiting job; its end is then known to be no wish of the user."""
        self._write(withdrawn=(*self._known.withdrawn[-9:], job))
        self.queue.cancel(job)
        self.say(f"job {job} {why}: withdrawn", "withdraw", job=job)

    def _grow(self, row: JobRow, now: float) -> None:
        """Tell the job to save and leave, when nodes for a larger size have been free for long enough."""
        if not self._may_resize():
            return
        larger = (size for size in self.sizes if size > row.nodes)
        size = next((n for n in larger if self._are_free(row, n - row.nodes)), None)
        if size is None:
            self._free = None
            return
        if self._free is None:
            self._free = (size, now)
        if now - self._free[1] < self.config.grow_after_seconds:
            return
        self._write(
            resizes=(*self._recent(), time.time())
        )  # before the action: a kill in between costs a chance, not the bound
        self.queue.tell(row.job)
        self._free = (
            None  # the signal may be lost: told again where the nodes stay free for as long
        )
        self.say(f"{size - row.nodes} more nodes are free: job {row.job} saves and moves from {row.nodes} to {size}",
                 "grow", job=row.job, nodes=row.nodes, to=size)  # fmt: skip

    def _recent(self) -> tuple[float, ...]:
        """Times of the last hour's resizes."""
        return tuple(t for t in self._known.resizes if 0 <= time.time() - t < _HOUR)

    def _may_resize(self) -> bool:
        return len(self._recent()) < self.config.max_resizes_per_hour

    def _are_free(self, row: JobRow, nodes: int) -> bool:
        """Whether so many nodes beside the job's own are idle, fit, and nobody else waits for them."""
        others = (*self._known.excluded, row.node_list)  # it may leave cores of its own nodes idle
        seconds = self.queue.starts_in(self.script, nodes, others)
        return seconds is not None and seconds <= _NOW_SECONDS

    def _judge(self, row: JobRow) -> int | None:
        """Act on the end of a job: None to go on, else the exit code."""
        known = self._known
        own = row.state == "CANCELLED" and row.job in known.withdrawn
        broken = self._broken(row)
        ended = f"job {row.job} ended as {row.state} with code {row.code}"
        if row.state == "COMPLETED":
            self._write(handled=row.job)
            self.say(f"job {row.job} is done")
            return int(ExitCode.DONE)
        stopped = row.state == "FAILED" and row.code == ExitCode.REQUEUE
        if not (own or stopped or broken or row.state in _LOST):
            self._write(handled=row.job)
            self.say(f"{ended}, which starting again does not fix")
            return 1 if row.state == "CANCELLED" else row.code or 1
        if known.restarts >= self.max_restarts:
            self._write(handled=row.job)
            self.say(f"{ended}, after {known.restarts} restarts, as many as are allowed")
            return 1
        excluded = (*known.excluded, *broken)
        self._write(handled=row.job, restarts=known.restarts + (not own), excluded=excluded)
        if not own:
            without = f", without {','.join(excluded)}" if excluded else ""
            self.say(f"{ended}: starting it again{without}", "lost" if row.state in _LOST else "left",
                     job=row.job, cause=row.state.lower(), code=row.code)  # fmt: skip
        return None

    def _broken(self, row: JobRow) -> list[str]:
        """Nodes that made the job leave with code 71, and were not left out yet."""
        if row.code != ExitCode.HARDWARE or self.journal is None:
            return []
        return [node for node in broken_nodes(self.journal) if node not in self._known.excluded]

    # ---- what is remembered

    @property
    def _known(self) -> _State:
        assert self.state is not None
        return self.state

    def _written_ends(self) -> list[JobRow]:
        """Ends that Slurm has forgotten, as the jobs wrote them down."""
        try:
            text = (self.script.parent / f"ends-{self.name}").read_text(errors="replace")
        except FileNotFoundError:
            return []
        found = [
            map(int, line.split())
            for line in re.findall(r"^\d+ \d{1,3}$", text, re.MULTILINE | re.ASCII)
        ]
        return [
            JobRow(job, "FAILED" if code else "COMPLETED", 0, code)
            for job, code in found
            if job in _JOB_IDS
        ]

    def _read(self) -> _State | None:
        """The state; None before the first one, and, with a line that says so, for a file that holds none."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            return _State.of(json.loads(content))
        except Exception as error:  # as it may be damaged in any way
            self.say(f"{self.path} holds no state, and is written anew: {error!r}")
            return None

    def _write(self, **changes: Any) -> None:
        self._save(replace(self._known, **changes))

    def _save(self, state: _State) -> None:
        """Replace the state file; a kill leaves the old one or the new one."""
        write_file(self.path, json.dumps(asdict(state)))
        self.state = state
