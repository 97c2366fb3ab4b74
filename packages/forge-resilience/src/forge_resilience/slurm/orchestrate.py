"""A small process that keeps one training job in Slurm's queue, on as many nodes as there are: `orchestrate`.

It may be killed at any instant and started again, by Slurm or by hand. What it must not forget is in Slurm's records (all
jobs of a run have one name, of which Slurm runs one at a time) and in a small file that is replaced in one step.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forge_resilience._shared.paths import user_path
from forge_resilience._shared.problems import invalid
from forge_resilience.exit_codes import ExitCode, History, NoRestart, may_restart
from forge_resilience.health import broken_nodes
from forge_resilience.journal import Journal
from forge_resilience.slurm.client import JobRow, Queue, QueueDown, QueueRefusal
from forge_resilience.slurm.config import OrchestratorConfig
from forge_resilience.slurm.state_files import OrchestratorState, read_ends, state_path

#: Ends that are not the job's own doing. A time limit is met when a save took too long.
_LOST = {"NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "TIMEOUT", "DEADLINE", "REVOKED"}
_NOW_SECONDS = 5.0  # Slurm's answer "at once" is the time of its last look
_MINUTE = 60.0  # Slurm plans in steps of it
_HOUR = 3600.0


def chain_name(run_dir: str | os.PathLike[str]) -> str:
    """Return the name of a run's jobs in the queue: the name of its folder, and a digest of the full path."""
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
    """Keep the job of `script` running on one of `sizes` (numbers of nodes) until it ends; return its exit code.

    The script must not continue itself (`SlurmConfig(on_stop="leave")`): it leaves with 75 when it was stopped by USR1,
    TERM or a lost node, and appends a line `<job id> <exit code>` to `ends-<name>` in its folder when it ends, for an
    orchestrator that was away longer than Slurm remembers. 75, Slurm's own ends (node failure, preemption, time limit), and 71 if
    the journal names nodes to leave out, are followed by another submission, at most `max_restarts` times. Every other
    code is returned; 1 for a job that a user cancelled, and for one whose restarts are used up (a script that goes on by
    itself ends with 75 then). What it does is recorded in the journal.

    Restarts are counted over all calls for this name, in `orchestrator-<name>.json` next to the script: remove that file,
    while none runs, to count from 0 again. 70 comes from the script, which counts in `lives-<name>`: remove that too.
    `stopped` turning true makes it return 75 and leave the job running; started again, it finds the job.

    Raises ValueError for sizes or a name that cannot be, QueueRefusal when Slurm rejects the script.
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
    own = _Orchestrator(
        script=script,
        sizes=sorted(sizes, reverse=True),
        name=name,
        config=config,
        max_restarts=max_restarts,
        journal=journal,
        queue=Queue(),
    )

    while (code := own.look()) is None:
        deadline = time.monotonic() + config.poll_seconds
        while time.monotonic() < deadline:
            if stopped():
                own.report(
                    "stopped; the job goes on; so does this command when it is started again"
                )
                return int(ExitCode.REQUEUE)
            time.sleep(min(0.5, config.poll_seconds))
    return code


@dataclass(kw_only=True)
class _Orchestrator:
    """Looks at the queue and acts; `state` outlives a kill, the other fields do not."""

    script: Path
    sizes: Sequence[int]  # largest first, because the first that starts soon is taken
    name: str
    config: OrchestratorConfig
    max_restarts: int
    journal: str | os.PathLike[str] | None
    queue: Queue
    state: OrchestratorState | None = None

    def __post_init__(self) -> None:
        self.path = state_path(self.script, self.name)
        # (job, state) of the last look, because a change of them begins the waits anew
        self._seen: tuple[int, str] | None = None
        self._since = 0.0  # when they were seen first, as `wait_seconds` counts from there
        # a larger size that is possible, and since when, as a job grows only after `grow_after_seconds` of it
        self._free: tuple[int, float] | None = None
        # the job whose long wait was reported, so that no other look reports it again
        self._reported = 0
        self._is_down = False

    def report(self, text: str, event: str | None = None, **fields: Any) -> None:
        """Print a line, and record an event in the journal."""
        with contextlib.suppress(OSError):  # a full disk or a closed terminal must not end this
            print(f"{time.strftime('%FT%T')} forge: {text}", file=sys.stderr, flush=True)
        if event is not None and self.journal is not None:
            Journal(self.journal).record(event, **fields)

    def look(self) -> int | None:
        """Look at the queue and do at most one action; return the exit code once the job has ended."""
        try:
            code = self._look()
        except (QueueDown, OSError) as error:  # decide nothing: the job may be running
            if not self._is_down:
                self.report(f"no answer of Slurm or of a disk, waiting for it: {error}")
            self._is_down = True
            return None
        self._is_down = False
        return code

    def _look(self) -> int | None:
        """`look` without the handling of a silent controller."""
        rows = self.queue.jobs(self.name)
        live = [row for row in rows if row.is_live]
        ends = [row for row in rows if not row.is_live]
        for job, code in read_ends(self.script, self.name):  # also of jobs that Slurm has forgotten
            ends.append(JobRow(job, "FAILED" if code else "COMPLETED", 0, code))

        self.state = self.state or self._read()
        if self.state is None:  # jobs that ended before the first submission are not of this run
            self._save(OrchestratorState(handled=max((row.job for row in ends), default=0)))

        for extra in live[1:]:  # its submission got no answer; `singleton` has kept it waiting
            self._cancel(extra.job, f"is one too many next to job {live[0].job}")
        if live:
            self._follow(live[0])
            return None
        if ended := [row for row in ends if row.job > self._memory.handled]:
            return self._handle_end(ended[0])
        self._submit()
        return None

    # ---- a job that is to come

    def _submit(self) -> None:
        """Submit the job; the next look sees whether Slurm accepted it."""
        size, excluded = self._choose_size(), self._memory.excluded
        try:
            job = self.queue.submit(self.script, size, self.name, excluded)
        except QueueRefusal as error:
            if not self._memory.restarts:
                raise
            self.report(f"{error}; trying again")  # it was accepted before: a limit of the moment
            return
        self.report(f"job {job} submitted on {size} nodes", "submit", job=job, nodes=size)

    def _choose_size(self) -> int:
        """Return the largest size that starts within wait_seconds, else the size that starts a minute before larger ones,
        else the smallest size."""
        first: tuple[float, int] | None = None
        for size in self.sizes:
            seconds = self.queue.seconds_to_start(self.script, size, self._memory.excluded)
            if seconds is not None and seconds <= self.config.wait_seconds:
                return size
            if seconds is not None and (first is None or seconds < first[0] - _MINUTE):
                first = (seconds, size)
        if first is not None:
            return first[1]

        sizes = ", ".join(map(str, self.sizes))
        self.report(f"none of {sizes} nodes fits what is there now: waiting for {self.sizes[-1]}")
        return self.sizes[-1]

    # ---- a job in the queue

    def _follow(self, row: JobRow) -> None:
        """Act on the job in the queue: cancel it for a smaller size, or grow it."""
        now = time.monotonic()
        if self._seen != (row.job, row.state):
            self._seen, self._since, self._free = (row.job, row.state), now, None
        if row.state == "PENDING" and now - self._since > self.config.wait_seconds:
            if row.job != self._reported:
                self.report(f"job {row.job} still waits for {row.nodes} nodes ({row.reason})")
                self._reported = row.job
            if not row.reason.startswith(("JobHeld", "Dependency")):
                self._cancel_if_smaller_fits(row)
        elif row.state == "RUNNING":
            self._grow(row, now)

    def _cancel_if_smaller_fits(self, row: JobRow) -> None:
        """Cancel a job that waits longer than Slurm predicted while a smaller size could run on idle nodes."""
        if not self._may_resize() or self.sizes[-1] >= row.nodes:
            return
        idle = self.queue.idle_nodes(row.partition)
        if idle >= self.sizes[-1]:
            self._count_resize()
            self._cancel(row.job, f"waits for {row.nodes} nodes while {idle} are idle")

    def _cancel(self, job: int, why: str) -> None:
        """Cancel a waiting job; the state remembers that its end is not the user's wish."""
        self._update(withdrawn=(*self._memory.withdrawn[-9:], job))
        self.queue.cancel(job)
        self.report(f"job {job} {why}: withdrawn", "withdraw", job=job)

    def _grow(self, row: JobRow, now: float) -> None:
        """Ask the job to save and leave, when nodes for a larger size have been free for long enough."""
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

        # before the action: a kill in between loses one resize and does not exceed the limit
        self._count_resize()
        self.queue.signal_batch_shell(row.job)
        # the signal may be lost: it is sent again where the nodes stay free for as long
        self._free = None
        text = f"{size - row.nodes} more nodes are free: job {row.job} saves and moves from {row.nodes} to {size}"
        self.report(text, "grow", job=row.job, nodes=row.nodes, to=size)

    def _recent_resizes(self) -> tuple[float, ...]:
        """Times of the last hour's resizes."""
        return tuple(t for t in self._memory.resizes if 0 <= time.time() - t < _HOUR)

    def _count_resize(self) -> None:
        self._update(resizes=(*self._recent_resizes(), time.time()))

    def _may_resize(self) -> bool:
        return len(self._recent_resizes()) < self.config.max_resizes_per_hour

    def _are_free(self, row: JobRow, nodes: int) -> bool:
        """Whether a job of `nodes` nodes next to the job's own would start at once."""
        others = (*self._memory.excluded, row.node_list)  # it may leave cores of its own nodes idle
        seconds = self.queue.seconds_to_start(self.script, nodes, others)
        return seconds is not None and seconds <= _NOW_SECONDS

    # ---- a job that has ended

    def _handle_end(self, row: JobRow) -> int | None:
        """Act on the end of a job; return None to go on, else the exit code."""
        known = self._memory
        if row.state == "COMPLETED":
            self._update(handled=row.job)
            self.report(f"job {row.job} is done")
            return int(ExitCode.DONE)

        own = row.state == "CANCELLED" and row.job in known.withdrawn
        stopped = row.state == "FAILED" and row.code == ExitCode.REQUEUE
        broken = self._broken_nodes(row)
        may_help = own or stopped or bool(broken) or row.state in _LOST
        counts = {"restarts": known.restarts, "max_restarts": self.max_restarts}
        history = History(may_help=may_help, **counts)
        ended = f"job {row.job} ended as {row.state} with code {row.code}"

        if (reason := may_restart(history)) is not None:
            self._update(handled=row.job)
            if reason is NoRestart.EXCLUDED:
                self.report(f"{ended}, and is not started again")
                return 1 if row.state == "CANCELLED" else row.code or 1
            used = f"after {known.restarts} restarts, as many as are allowed"
            self.report(f"{ended}, {used}: remove {self.path} to count anew")
            return 1

        excluded = (*known.excluded, *broken)
        self._update(handled=row.job, restarts=known.restarts + (not own), excluded=excluded)
        if not own:
            without = f", without {','.join(excluded)}" if excluded else ""
            event = "lost" if row.state in _LOST else "left"
            fields = {"job": row.job, "cause": row.state.lower(), "code": row.code}
            self.report(f"{ended}: starting it again{without}", event, **fields)
        return None

    def _broken_nodes(self, row: JobRow) -> list[str]:
        """Nodes that made the job leave with code 71, and are not left out yet."""
        if row.code != ExitCode.HARDWARE or self.journal is None:
            return []
        return [node for node in broken_nodes(self.journal) if node not in self._memory.excluded]

    # ---- what is remembered

    @property
    def _memory(self) -> OrchestratorState:
        assert self.state is not None
        return self.state

    def _read(self) -> OrchestratorState | None:
        """Read the state; None before the first one, and, with a warning, for a damaged file."""
        try:
            return OrchestratorState.read(self.path)
        except FileNotFoundError:
            return None
        except OSError:  # of the disk: the file may be whole
            raise
        except Exception as error:  # it may be damaged in any way
            self.report(f"{self.path} holds no state, and is written anew: {error!r}")
            return None

    def _update(self, **changes: Any) -> None:
        self._save(replace(self._memory, **changes))

    def _save(self, state: OrchestratorState) -> None:
        state.write(self.path)
        self.state = state
