"""`forge-train sweep`: the runs of a study, each in a process of its own, and the scaling law that fits them.

The folders of the runs are the only state, so a sweep that was killed at any time goes on by the same command.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tyro

from forge_lab._shared.jsonl import append_line
from forge_lab._shared.locks import Held, Lock
from forge_lab._shared.parents import with_parent
from forge_lab._shared.problems import Problem, invalid
from forge_lab.study.runs import Study, StudyRun, read_study, writing
from forge_resilience import ExitCode
from forge_train.errors import JobError, refuse


def run_sweep(
    study: tyro.conf.Positional[Path],
    /,
    dry_run: bool = False,
    gpu: str | None = None,
    jobs: int = 1,
    slurm: bool = False,
    submit: bool = False,
    site: str | None = None,
    report: Path | None = None,
) -> int:
    """Train the runs of a study that are not done, fit a scaling law to them, and write a page about both.

    Args:
        study: file of the study
        dry_run: print the runs with their price, and train nothing
        gpu: with --dry_run: price by the planner for this GPU, not by a few measured steps
        jobs: runs at the same time on this machine
        slurm: write batch scripts with an element for each run, and train nothing
        submit: with --slurm: submit them
        site: with --slurm: site file, or its name in ~/.config/forge
        report: page to write, .md, with a .json and .svg next to it; without it in study.dir
    """
    problems = []
    if jobs < 1:
        problems.append(Problem("--jobs", "range", jobs, "must be at least 1", "use --jobs 2"))
    if gpu is not None and not dry_run:
        problems.append(Problem("--gpu", "requires", gpu, "must go with --dry_run", "give both"))
    for key, value in (("--submit", submit or None), ("--site", site)):
        if value is not None and not slurm:
            problems.append(Problem(key, "requires", value, "must go with --slurm", "give it, too"))
    if dry_run and slurm:
        rule, fix = "and --slurm exclude each other", "give one of them"
        problems.append(Problem("--dry_run", "excludes", ..., rule, fix))
    if report is not None and (report.suffix != ".md" or not report.parent.is_dir()):
        rule = "must be a .md file in a folder that exists"
        problems.append(Problem("--report", "name", str(report), rule, "rename it"))
    refuse(problems)

    described = read_study(study)
    if dry_run:
        from forge_lab.study.price import print_plan

        print_plan(described, gpu)
        return ExitCode.DONE
    if slurm:
        from forge_lab.study.arrays import write_arrays

        return write_arrays(described, submit, site)

    from forge_lab.study.page import check_plot, write_page

    check_plot()
    with _locked(described.dir):
        code = Sweep(described, jobs).run()
        if code == ExitCode.DONE:
            where = report or described.dir / "study.md"
            try:
                write_page(described, where)
            except OSError as error:
                key, rule = "--report", f"cannot be written ({error.strerror})"
                fix = "choose another"
                raise invalid(key, "write", str(where), rule, fix, kind=JobError) from error
            print(f"the page of the study: {where}")
    return code


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the folder of a study: two sweeps would train the same runs. JobError while another sweep has it.

    The kernel frees the lock however the process ends.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = Lock(folder / "lock")
        except Held as error:
            rule, fix = f"is trained by {error.owner}", "wait for it, or stop it first"
            raise invalid("study.dir", "locked", str(folder), rule, fix, kind=JobError) from error
    try:
        yield
    finally:
        lock.release()


class Sweep:
    """Starts runs as soon as their trunk is done, those with the most operations first.

    A signal stops the runs, which save and exit; the sweep then ends with ExitCode.REQUEUE. If a run fails, only its
    forks do not start.
    """

    def __init__(self, study: Study, jobs: int) -> None:
        self.study, self.jobs = study, jobs
        self.waiting = [run for run in study.runs if not run.is_done()]
        self.running: dict[int, tuple[StudyRun, subprocess.Popen[bytes], float]] = {}
        self.failed: dict[str, int] = {}
        self.stopped = False

    def run(self) -> int:
        """Train the runs that are not done; return the exit code of the sweep."""
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
        if not self.failed:
            return ExitCode.DONE
        for name, code in self.failed.items():
            print(f"forge-train: {name} {_ended(code)}: see {self._log(name)}", file=sys.stderr)
        print(
            f"forge-train: of {len(self.study.runs)} runs {len(self.failed)} failed, and {len(self.waiting)} that fork from these "
            "were not started; the page needs all. Run the same command to try again, or take the failed runs out of the study",
            file=sys.stderr,
        )
        return max(next(iter(self.failed.values())), ExitCode.ERROR)

    def _next(self) -> StudyRun | None:
        """The largest run whose trunk is done."""
        done = {run.name for run in self.study.runs if run.parent is None and run.is_done()}
        ready = [run for run in self.waiting if run.parent is None or run.parent in done]
        return max(ready, key=lambda run: run.flops * run.own_part, default=None)

    def _start(self, run: StudyRun) -> None:
        """Start a run in a process of its own, whose output goes into its log."""
        self.waiting.remove(run)
        environ = {**os.environ, "OMP_NUM_THREADS": str(self.study.config.threads)}
        command = [sys.executable, "-m", "forge_train", "run", str(run.file)]
        try:
            with open(self._log(run.name), "ab") as log:
                process = subprocess.Popen(
                    command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    # Ctrl-C reaches only the sweep, which stops the runs; a sweep that is killed takes its runs along
                    start_new_session=True, preexec_fn=with_parent(),
                )  # fmt: skip
        except OSError as error:  # a full disk, no processes left
            self.failed[run.name] = ExitCode.ERROR
            print(f"{run.name} was not started: {error}", flush=True)
            return
        self.running[process.pid] = (run, process, time.monotonic())
        if self.stopped:  # while it was started
            self._terminate(process.pid)

    def _wait(self) -> None:
        """Wait for the end of a run, and record its cost."""
        pid, status, used = os.wait4(-1, 0)
        if pid not in self.running:
            return
        run, process, began = self.running.pop(pid)
        code = process.returncode = os.waitstatus_to_exitcode(status)
        attempt = {
            "run": run.name,
            "exit_code": code,
            "seconds": round(time.monotonic() - began, 2),
            "processor_seconds": round(used.ru_utime + used.ru_stime, 2),
        }

        try:
            append_line(self.study.dir / "lives.jsonl", attempt)
        except OSError as error:
            print(f"forge-train: the cost on the page lacks this attempt of {run.name}: {error}", file=sys.stderr)  # fmt: skip
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

    def _log(self, name: str) -> Path:
        return self.study.dir / "runs" / f"{name}.log"


def _ended(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with code {code}" if code else "ended"
