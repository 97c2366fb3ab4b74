"""Runs that a study or a grid plans, and the queue that trains them on this machine, each in a process of its own.

The folders of the runs are the only state, so a queue that was killed at any time goes on by the same command.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch

from forge_lab._shared.jsonl import append_line
from forge_lab._shared.locks import Held, Lock
from forge_lab._shared.parents import with_parent
from forge_lab._shared.problems import Problem, invalid, problems_of
from forge_lab._shared.toml_files import flatten, read_toml
from forge_resilience import ExitCode
from forge_train import ResolvedJob, RunDirectory
from forge_train.errors import ConfigError, DataError, JobError, refuse, write_errors

T = TypeVar("T")
Checked = TypeVar("Checked")


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A run that a file plans: its name, which is that of its folder, its length and its configuration.

    `parent` is the run that it forks from at step `begin`; `flops` include the steps that the parent has trained.
    """

    #: The key or flag that names the folder of all runs.
    folder_key: ClassVar[str] = "study.dir"

    name: str
    steps: int
    toml: str = field(repr=False)
    job: ResolvedJob = field(repr=False)
    parent: str | None = None
    begin: int = 0
    flops: float = 0.0

    @property
    def own_part(self) -> float:
        """The fraction of its steps that it trains itself."""
        return 1 - self.begin / self.steps

    @property
    def dir(self) -> Path:
        """The run's folder."""
        return Path(self.job.config.run.dir)

    @property
    def file(self) -> Path:
        """Its configuration, next to the folder."""
        return self.dir.with_name(f"{self.name}.toml")

    @property
    def log(self) -> Path:
        """The output of its processes, next to the folder."""
        return self.dir.with_name(f"{self.name}.log")

    def is_done(self) -> bool:
        """Whether its last step is saved."""
        return self.steps in RunDirectory(self.dir).committed()

    def problems(self) -> Iterator[Problem]:
        """Why it cannot go on: it, or its trunk, was begun with another configuration."""
        folder = str(self.dir.parent.parent)
        of_trunk = RunDirectory(self.dir.with_name(self.parent)).committed() if self.parent else {}
        has_begun = RunDirectory(self.dir).has_checkpoints()
        if not has_begun and max(of_trunk, default=0) > self.begin not in of_trunk:
            rule = (
                f"has {self.parent}, which did not save at step {self.begin}, from which {self.name} forks: it was trained "
                "for other budgets"
            )
            yield Problem(self.folder_key, "parent", folder, rule, "choose another")
        elif has_begun and (keys := self._changed()):
            rule = f"has {self.name}, which was begun with another configuration: {keys[:9]}"
            fix = f"set that back to what {self.file.name} there has, or choose another folder"
            yield Problem(self.folder_key, "changed", folder, rule, fix)

    def write(self) -> None:
        """Write the configuration. ConfigError for `problems`, JobError where it cannot be written."""
        refuse(self.problems())
        if self._changed():
            with writing(self.file, self.folder_key):
                self.file.parent.mkdir(parents=True, exist_ok=True)
                self.file.write_text(self.toml, encoding="utf-8")

    def _changed(self) -> list[str]:
        """Keys whose values differ from those of the file; all keys without a file. Comments are not compared."""
        new = dict(flatten(tomllib.loads(self.toml)))
        old: dict[str, Any] = {}
        with contextlib.suppress(ValueError):
            old = dict(flatten(read_toml(self.file)))
        return sorted(key for key in {*old, *new} if old.get(key, ...) != new.get(key, ...))


def check_all(items: Iterable[T], check: Callable[[T], Checked]) -> list[Checked]:
    """`check` of each item. One error, of the kind of the first, with the problems of all items, each once."""
    found, kinds, seen = list[Checked](), list[type[JobError]](), dict[str, Problem]()
    for item in items:
        try:
            found.append(check(item))
        except (ConfigError, DataError) as error:
            kinds.append(type(error))
            seen |= {str(problem): problem for problem in problems_of(error)}
    if kinds:
        raise kinds[0](list(seen.values()))
    return found


def writing(path: Path, key: str) -> contextlib.AbstractContextManager[None]:
    """Turn an OSError of the block into a JobError about `path` below the folder of `key`."""
    return write_errors(key, path, "choose another", JobError)


@contextlib.contextmanager
def locked(folder: Path, key: str) -> Iterator[None]:
    """Lock a folder of runs: two queues would train the same ones. JobError while another process has it.

    The kernel frees the lock however the process ends.
    """
    with writing(folder, key):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = Lock(folder / "lock")
        except Held as error:
            rule, fix = f"is trained by {error.owner}", "wait for it, or stop it first"
            raise invalid(key, "locked", str(folder), rule, fix, kind=JobError) from error
    try:
        yield
    finally:
        lock.release()


class _Running(NamedTuple):
    run: PlannedRun
    process: subprocess.Popen[bytes]
    began: float
    slot: int


class RunQueue:
    """Starts runs as soon as their trunk is done, those with the most operations first, `jobs` at a time.

    A signal stops the runs, which save and exit; the queue then ends with ExitCode.REQUEUE. If a run fails, only its
    forks do not start. `nproc` and `threads` are the processes of a run, and the threads of each.
    """

    def __init__(
        self,
        folder: Path,
        runs: Sequence[PlannedRun],
        jobs: int,
        threads: int = 1,
        nproc: int | None = None,
    ) -> None:
        self.folder, self.runs, self.jobs = folder, runs, jobs
        self.threads, self.nproc = threads, nproc
        self.waiting = [run for run in runs if not run.is_done()]
        self.running: dict[int, _Running] = {}
        self.failed: dict[str, int] = {}
        self.stopped = False

    def train(self) -> int:
        """Train the runs that are not done; return the exit code of all. ConfigError before the first one starts."""
        refuse(problem for run in self.runs for problem in run.problems())
        for each in self.waiting:
            each.write()
        kept = {
            number: signal.signal(number, self._stop)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
        }

        try:
            while True:
                while not self.stopped and len(self.running) < self.jobs and (run := self._next()):
                    self._start(run)
                if not self.running:
                    break
                self._wait()
        finally:
            for number, handler in kept.items():
                signal.signal(number, handler)

        if self.stopped:
            return ExitCode.REQUEUE
        return self._print_failed() if self.failed else ExitCode.DONE

    def _print_failed(self) -> int:
        """Name the runs that failed; the exit code of the first one, or 1 if a signal killed it."""
        logs = {run.name: run.log for run in self.runs}
        for name, code in self.failed.items():
            print(f"forge-train: {name} {_ended(code)}: see {logs[name]}", file=sys.stderr)
        left = len(self.waiting)
        forks = f", and {left} that fork from these were not started" if left else ""
        print(
            f"forge-train: of {len(self.runs)} runs {len(self.failed)} failed{forks}. Run the same command to try again, or take "
            "the failed runs out",
            file=sys.stderr,
        )
        return max(next(iter(self.failed.values())), ExitCode.ERROR)

    def _next(self) -> PlannedRun | None:
        """The largest run whose trunk is done, the first of equal ones."""
        done = {run.name for run in self.runs if run.parent is None and run.is_done()}
        ready = [run for run in self.waiting if run.parent is None or run.parent in done]
        return max(ready, key=lambda run: run.flops * run.own_part, default=None)

    def _start(self, run: PlannedRun) -> None:
        """Start a run in a process of its own, whose output goes into its log."""
        self.waiting.remove(run)
        slot = min(set(range(self.jobs)) - {other.slot for other in self.running.values()})
        environ = {**os.environ, "OMP_NUM_THREADS": str(self.threads)}
        environ |= devices_of_slot(slot, self.nproc or 1)
        command = [sys.executable, "-m", "forge_train", "run", str(run.file)]
        command += ["--nproc", str(self.nproc)] if self.nproc else []
        try:
            with open(run.log, "ab") as log:
                process = subprocess.Popen(
                    command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    # Ctrl-C reaches only the queue, which stops the runs; a queue that is killed takes its runs along
                    start_new_session=True, preexec_fn=with_parent(),
                )  # fmt: skip
        except OSError as error:  # a full disk, no processes left
            self.failed[run.name] = ExitCode.ERROR
            print(f"{run.name} was not started: {error}", flush=True)
            return
        self.running[process.pid] = _Running(run, process, time.monotonic(), slot)
        if self.stopped:  # while it was started
            self._terminate(process.pid)

    def _wait(self) -> None:
        """Wait for the end of a run, and record its cost."""
        pid, status, used = os.wait4(-1, 0)
        if pid not in self.running:
            return
        run, process, began, _ = self.running.pop(pid)
        code = process.returncode = os.waitstatus_to_exitcode(status)
        attempt = {
            "run": run.name,
            "exit_code": code,
            "seconds": round(time.monotonic() - began, 2),
            "processor_seconds": round(used.ru_utime + used.ru_stime, 2),
        }

        try:
            append_line(self.folder / "lives.jsonl", attempt)
        except OSError as error:
            print(f"forge-train: the cost of {run.name} lacks this attempt: {error}", file=sys.stderr)  # fmt: skip
        if code == ExitCode.REQUEUE:
            self.stopped = True  # the run got its signal from elsewhere
        elif code or not run.is_done():
            self.failed[run.name] = code or ExitCode.ERROR

        left = len(self.waiting) + len(self.running)
        print(
            f"{run.name} {_ended(code)}, {attempt['processor_seconds']} processor seconds; {left} to go",
            flush=True,
        )

    def _stop(self, *_: Any) -> None:
        if not self.stopped:
            print("stopping: the runs save; the same command goes on", file=sys.stderr)
        self.stopped = True
        for pid in list(self.running):
            self._terminate(pid)

    @staticmethod
    def _terminate(pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended, and `_wait` has not seen it
            os.kill(pid, signal.SIGTERM)


def devices_of_slot(slot: int, nproc: int) -> dict[str, str]:
    """The variable that gives each slot GPUs of its own, in turn where there are too few; {} without a choice of GPUs."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = (
        [str(i) for i in range(torch.cuda.device_count())] if given is None else given.split(",")
    )
    if len(names) <= nproc:
        return {}
    own = [names[(slot * nproc + rank) % len(names)] for rank in range(nproc)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(own)}


def _ended(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with code {code}" if code else "ended"
