"""Client commands of Slurm: how they are run, and what they answer or reject."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NoReturn

from forge_resilience._shared.parents import with_parent
from forge_resilience._shared.problems import Problem, invalid

_PROGRAMS = ("sbatch", "squeue", "scancel", "scontrol", "sinfo")
_LIMIT_SECONDS = 120.0
_NO_ANSWER = f"gave no answer within {_LIMIT_SECONDS:g} s"
_NOT_HERE = "is not on this machine; run this on a login node of the cluster"
_QUERY_SECONDS = 20.0
_KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_TIME_FORMAT")
_COLUMNS = "--Format=JobID:|,State:|,NumNodes:|,exit_code:|,Reason:|,Partition:|,NodeList:|"
_START = re.compile(r"to start at (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)")
_LIVE = {
    "PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "STOPPED", "COMPLETING", "STAGE_OUT", "SIGNALING",
    "RESIZING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT",
}  # fmt: skip


# ---- any command


def clean_environ(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return `environ` without the variables of a job that this process may be in: sbatch takes them as options."""
    return {name: value for name, value in environ.items()
            if name in _KEPT or not name.startswith(("SLURM_", "SLURMD_", "FORGE_CHAIN"))}  # fmt: skip


def call(
    *command: str, environ: Mapping[str, str] | None = None, timeout: float = _LIMIT_SECONDS
) -> subprocess.CompletedProcess[str]:
    """Run a client command in `environ`, by default `clean_environ()`, and capture its output.

    The command dies with this process: an sbatch that outlives its caller may submit a job that no process follows.
    Raises OSError where the command is missing, and subprocess.TimeoutExpired.
    """
    return subprocess.run(
        command,
        env=clean_environ() if environ is None else environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        preexec_fn=with_parent(),
    )


def answer(*command: str) -> str:
    """Return the output of a query; "" where the command is missing, fails, or takes longer than 20 s."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = call(*command, timeout=_QUERY_SECONDS)
        return "" if done.returncode else done.stdout
    return ""


def replace_process(command: list[str]) -> NoReturn:
    """Run a command in place of this process, with `clean_environ`. Raises RuntimeError where it is not on this machine."""
    try:
        os.execvpe(command[0], command, clean_environ())
    except FileNotFoundError:
        raise RuntimeError(f"{command[0]} {_NOT_HERE}") from None


# ---- jobs of a run


def submit(script: str, *options: str) -> str:
    """Submit the script, with further options of sbatch, and return the job's id. Raises RuntimeError with sbatch's message."""
    return _output("sbatch", "--parsable", *options, script).strip().partition(";")[0]


def _output(*command: str, environ: Mapping[str, str] | None = None) -> str:
    """The output of a command that Slurm accepts; else a RuntimeError with its message."""
    try:
        done = call(*command, environ=environ)
    except FileNotFoundError:
        raise RuntimeError(f"{command[0]} {_NOT_HERE}") from None
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{command[0]} {_NO_ANSWER}") from error
    if done.returncode:
        text = (done.stderr or done.stdout).strip() or f"code {done.returncode}"
        raise RuntimeError(text if text.startswith(command[0]) else f"{' '.join(command)}: {text}")
    return done.stdout


def jobs_of(*scripts: str) -> list[tuple[str, str]]:
    """Return (id, state) of this user's jobs that were submitted from these scripts and have not ended; [] without Slurm."""
    lines = answer("squeue", "--me", "--noheader", "--format=%i|%T|%o").splitlines()
    rows = [line.split("|", 2) for line in lines]
    return [(row[0], row[1]) for row in rows if len(row) == 3 and row[2] in scripts]


def two_jobs(key: str, folder: str, queued: Sequence[tuple[str, str]]) -> list[Problem]:
    """Return a problem for each job (id, state) that is in the queue for this folder already."""
    rule = "has job {} in the queue ({}), and two jobs cannot train one run"
    fix = "scancel it first, or choose another folder"
    return [Problem(key, "queued", folder, rule.format(*job), fix) for job in queued]


def exclude_nodes(
    nodes: Sequence[str], job: str | None = None, environ: Mapping[str, str] | None = None
) -> None:
    """Requeue a Slurm job without `nodes`; by default the job that this process belongs to.

    `scontrol requeue`, then the nodes are added to the ExcNodeList of the pending job. Slurm starts a requeued job only when its
    old credential has expired (120 s by default), so there is time. A caller that is killed in between leaves a job that
    starts on any node (`requeuehold` would leave one that never starts). Slurm ends the processes of the job with TERM at
    once: the caller must ignore TERM (`trap '' TERM`).

    Raises RuntimeError with Slurm's message if Slurm rejects it, ValueError for invalid names.
    """
    for node in nodes:
        if not re.fullmatch(r"[\w.-]+", node):
            raise invalid("nodes", "name", node, "must name a node", "use one that sinfo lists")
    environ = os.environ if environ is None else environ
    job = job or environ.get("SLURM_JOB_ID")
    if not nodes:
        raise invalid("nodes", "missing", list(nodes), "must be given")
    if not job:
        raise invalid("job", "missing", job, "must be given outside a job")

    environ = clean_environ(environ)
    _output("scontrol", "requeue", job, environ=environ)
    shown = _output("scontrol", "--oneliner", "show", "job", job, environ=environ)
    (before,) = re.findall(r" ExcNodeList=(\S+)", shown)[:1] or ["(null)"]
    names = ",".join(([] if before == "(null)" else [before]) + list(nodes))
    _output("scontrol", "update", f"JobId={job}", f"ExcNodeList={names}", environ=environ)


# ---- the queue, for an orchestrator


class QueueDown(Exception):
    """The controller does not answer: the state of the jobs is unknown, and nothing was decided."""


class QueueRefusal(Exception):
    """The controller answers and rejects a command, or there is no Slurm."""


@dataclass(frozen=True)
class JobRow:
    """A job in the queue, or one that ended in the last minutes (MinJobAge).

    state: Slurm's word, such as PENDING or NODE_FAIL. node_list: where it runs, such as n[1-3]. code: exit code of the
    batch script, 128 + n after signal n.
    """

    job: int
    state: str
    nodes: int
    code: int
    reason: str = ""
    partition: str = ""
    node_list: str = ""

    @property
    def is_live(self) -> bool:
        """Whether the job waits, runs, or is about to end."""
        return self.state in _LIVE


class Queue:
    """Client commands of one user; each raises QueueDown when the controller does not answer.

    Raises QueueRefusal where the commands are missing.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        path = environ.get("PATH")
        missing = [name for name in _PROGRAMS if shutil.which(name, path=path) is None]
        if missing:
            names = ", ".join(missing)
            raise QueueRefusal(f"{names} cannot be found here; start this where sbatch works")
        self.environ = clean_environ(environ) | {"SLURM_TIME_FORMAT": "standard"}

    def jobs(self, name: str) -> list[JobRow]:
        """Return this user's jobs of that name, oldest first, also those that ended a short while ago."""
        columns = ("--noheader", "--states=all", "--me", f"--name={name}", _COLUMNS)
        try:
            out, _ = self._run("squeue", *columns)
        except QueueRefusal as error:  # a query is always valid: the answer is missing
            raise QueueDown(str(error)) from error

        rows = [line.split("|") for line in out.splitlines() if line.count("|") >= 7]
        jobs = [JobRow(int(r[0]), r[1], int(r[2]), _exit_code(int(r[3])), *r[4:7]) for r in rows]
        return sorted(jobs, key=lambda row: row.job)

    def idle_nodes(self, partition: str) -> int:
        """Count the nodes of a partition (or of several, as `a,b`) that no job runs on or is planned for."""
        command = ("sinfo", "--noheader", "--Node", f"--partition={partition}", "--format=%N %t")
        rows = {line.strip() for line in self._run(*command)[0].splitlines()}
        return sum(row.endswith(" idle") for row in rows)

    def seconds_to_start(
        self, script: Path, nodes: int, excluded: Sequence[str] = ()
    ) -> float | None:
        """Predict the seconds until a job of `nodes` nodes starts; None if the present nodes cannot hold it.

        Slurm counts waiting jobs, also this user's, as if they ran for their whole limit.
        """
        try:
            options = (f"--nodes={nodes}", *_exclude(script, excluded))
            _, err = self._run("sbatch", "--test-only", *options, str(script))
        except QueueRefusal:
            return None
        start = _START.search(err)
        if start is None:
            raise QueueDown(f"sbatch --test-only names no start: {err.strip()}")
        return (datetime.fromisoformat(start[1]) - datetime.now()).total_seconds()

    def submit(self, script: Path, nodes: int, name: str, excluded: Sequence[str]) -> int:
        """Submit the script and return the job's id. Slurm runs only one job of that name at once (`singleton`).

        The script counts the attempts of all jobs of that name together. Raises QueueRefusal with Slurm's reason.
        """
        options = [f"--job-name={name}", f"--nodes={nodes}", "--dependency=singleton"]
        options += _exclude(script, excluded)
        more = {"FORGE_CHAIN": name}
        out, _ = self._run("sbatch", "--parsable", *options, str(script), more=more)
        return int(out.strip().partition(";")[0])

    def signal_batch_shell(self, job: int) -> None:
        """Send USR1 to the job's batch shell, which asks it to save and leave; nothing if the job has ended."""
        with contextlib.suppress(QueueRefusal):
            self._run("scancel", "--signal=USR1", "--batch", str(job))

    def cancel(self, job: int) -> None:
        """Cancel a job; nothing if it has ended."""
        with contextlib.suppress(QueueRefusal):
            self._run("scancel", str(job))

    def _run(self, *command: str, more: Mapping[str, str] = {}) -> tuple[str, str]:
        """(stdout, stderr) of a command that Slurm accepts."""
        done = self._call(*command, more=more)
        if done.returncode == 0:
            return done.stdout, done.stderr
        message = " ".join((done.stderr or done.stdout).split())
        # A rejection and a silent controller differ only in words, which change from version to version.
        if self._call("scontrol", "ping", more=more).returncode:
            raise QueueDown(message)
        raise QueueRefusal(f"{command[0]}: {message}")

    def _call(self, *command: str, more: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        try:
            return call(*command, environ={**self.environ, **more})
        except subprocess.TimeoutExpired as error:
            raise QueueDown(f"{command[0]} {_NO_ANSWER}") from error


def _exclude(script: Path, nodes: Sequence[str]) -> list[str]:
    """The sbatch option that leaves out `nodes` and the nodes that the script leaves out itself."""
    if not nodes:
        return []
    own = re.findall(r"^#SBATCH (?:--exclude|-x)[= ](\S+)", script.read_text(), re.MULTILINE)
    return [f"--exclude={','.join([*own, *nodes])}"]


def _exit_code(status: int) -> int:
    """The exit code that a shell gives for a wait status."""
    return 128 + (status & 127) if status & 127 else status >> 8
