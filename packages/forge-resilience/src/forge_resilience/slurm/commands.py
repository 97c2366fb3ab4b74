"""Slurm's queue as an orchestrator needs it: what is known, and what was only not answered."""

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

from forge_resilience._shared.parents import with_parent
from forge_resilience.slurm.queue import clean_environ

__all__ = ["JobRow", "Queue", "QueueDown", "QueueRefusal"]

_PROGRAMS = ("sbatch", "squeue", "scancel", "scontrol", "sinfo")
_LIMIT_SECONDS = 120.0
_COLUMNS = "--Format=JobID:|,State:|,NumNodes:|,exit_code:|,Reason:|,Partition:|,NodeList:|"
_START = re.compile(r"to start at (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)")


class QueueDown(Exception):
    """The controller does not answer: nothing is known, and nothing was decided."""


class QueueRefusal(Exception):
    """The controller answers and refuses a command, or there is no Slurm."""


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
        """Waits, runs, or is about to end."""
        return self.state in _LIVE


_LIVE = {
    "PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "STOPPED", "COMPLETING", "STAGE_OUT", "SIGNALING",
    "RESIZING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT",
}  # fmt: skip


class Queue:
    """Client commands; each raises QueueDown when the controller does not answer.

    They run without the variables of a job that this process may be part of, which sbatch would take as options, and
    die with it: a command that outlived its caller might submit a job that nobody knows.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        missing = [
            name for name in _PROGRAMS if shutil.which(name, path=environ.get("PATH")) is None
        ]
        if missing:
            raise QueueRefusal(
                f"{', '.join(missing)} cannot be found here; start this where sbatch works"
            )
        self.environ = clean_environ(environ)
        self.environ["SLURM_TIME_FORMAT"] = "standard"

    def jobs(self, name: str) -> list[JobRow]:
        """This user's jobs of that name, oldest first, also those that ended a short while ago."""
        try:
            out, _ = self._run(
                "squeue", "--noheader", "--states=all", "--me", f"--name={name}", _COLUMNS
            )
        except QueueRefusal as error:  # a question is never wrong: the answer is missing
            raise QueueDown(str(error)) from error
        rows = [line.split("|") for line in out.splitlines() if line.count("|") >= 7]
        return sorted(
            (
                JobRow(int(r[0]), r[1], int(r[2]), _exit_code(int(r[3])), r[4], r[5], r[6])
                for r in rows
            ),
            key=lambda row: row.job,
        )

    def idle(self, partition: str) -> int:
        """Nodes of a partition (or of several, as `a,b`) that nothing runs on and that nothing is planned for."""
        command = ("sinfo", "--noheader", "--Node", f"--partition={partition}", "--format=%N %t")
        rows = {line.strip() for line in self._run(*command)[0].splitlines()}
        return sum(row.endswith(" idle") for row in rows)

    def starts_in(self, script: Path, nodes: int, excluded: Sequence[str] = ()) -> float | None:
        """Seconds until a job of so many nodes would start; None if the nodes there are now cannot hold it.

        Slurm counts jobs that wait already as if they ran for their whole limit, an own one too.
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

    def submit(
        self,
        script: Path,
        nodes: int,
        name: str,
        excluded: Sequence[str],
        environ: Mapping[str, str],
    ) -> int:
        """Submit the script; its id. Slurm itself runs no two jobs of that name at once (`singleton`).

        Raises QueueRefusal with Slurm's reason.
        """
        options = [f"--job-name={name}", f"--nodes={nodes}", "--dependency=singleton"]
        options += _exclude(script, excluded)
        out, _ = self._run("sbatch", "--parsable", *options, str(script), more=environ)
        return int(out.strip().partition(";")[0])

    def tell(self, job: int) -> None:
        """USR1 to the job's batch shell; nothing if it has ended meanwhile."""
        with contextlib.suppress(QueueRefusal):
            self._run("scancel", "--signal=USR1", "--batch", str(job))

    def cancel(self, job: int) -> None:
        """End a job; nothing if it has ended meanwhile."""
        with contextlib.suppress(QueueRefusal):
            self._run("scancel", str(job))

    def _run(self, *command: str, more: Mapping[str, str] | None = None) -> tuple[str, str]:
        done = self._call(command, more or {})
        if done.returncode == 0:
            return done.stdout, done.stderr
        said = " ".join((done.stderr or done.stdout).split())
        # A refusal and a silent controller differ only in words, which change from version to version.
        if self._call(("scontrol", "ping"), {}).returncode:
            raise QueueDown(said)
        raise QueueRefusal(f"{command[0]}: {said}")

    def _call(
        self, command: Sequence[str], more: Mapping[str, str]
    ) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                command,
                env={**self.environ, **more},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_LIMIT_SECONDS,
                preexec_fn=with_parent(),
            )
        except subprocess.TimeoutExpired as error:
            raise QueueDown(f"{command[0]} gave no answer within {_LIMIT_SECONDS:g} s") from error


def _exclude(script: Path, nodes: Sequence[str]) -> list[str]:
    """The option that leaves nodes out, beside those that the script leaves out itself."""
    if not nodes:
        return []
    own = re.findall(r"^#SBATCH (?:--exclude|-x)[= ](\S+)", script.read_text(), re.MULTILINE)
    return [f"--exclude={','.join([*own, *nodes])}"]


def _exit_code(status: int) -> int:
    """Of a wait status, as a shell gives it."""
    return 128 + (status & 127) if status & 127 else status >> 8
