"""Submitting a script from anywhere, also from inside another job."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import NoReturn

from forge_resilience._shared.problems import Problem

__all__ = ["clean_environ", "jobs_of", "replace_process", "submit", "two_jobs"]

_KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_TIME_FORMAT")


def clean_environ(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """`environ` without the variables of a job that this process may be in: sbatch hands them all on."""
    return {name: value for name, value in environ.items()
            if name in _KEPT or not name.startswith(("SLURM_", "SLURMD_", "FORGE_CHAIN"))}  # fmt: skip


def submit(script: str, *options: str) -> str:
    """Submit the script, with further options of sbatch, and return the job's id. Raises RuntimeError with what sbatch said."""
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", *options, script],
            capture_output=True,
            text=True,
            env=clean_environ(),
        )
    except FileNotFoundError:
        raise RuntimeError(
            "sbatch is not on this machine; submit from a login node of the cluster"
        ) from None
    if done.returncode:
        raise RuntimeError(done.stderr.strip() or f"sbatch ended with code {done.returncode}")
    return done.stdout.strip().partition(";")[0]


def replace_process(command: list[str]) -> NoReturn:
    """Run a command in place of this process, with `clean_environ`. Raises RuntimeError where it is not on this machine."""
    try:
        os.execvpe(command[0], command, clean_environ())
    except FileNotFoundError:
        text = f"{command[0]} is not on this machine; run this on a login node of the cluster"
        raise RuntimeError(text) from None


def jobs_of(*scripts: str) -> list[tuple[str, str]]:
    """(id, state) of this user's jobs that were submitted from these scripts and have not ended; empty without Slurm."""
    try:
        done = subprocess.run(
            ["squeue", "--me", "--noheader", "--format=%i|%T|%o"],
            capture_output=True,
            text=True,
            timeout=20,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.split("|", 2) for line in done.stdout.splitlines()]
    return [(row[0], row[1]) for row in rows if len(row) == 3 and row[2] in scripts]


def two_jobs(key: str, folder: str, queued: Sequence[tuple[str, str]]) -> list[Problem]:
    """A problem for each job (id, state) that is in the queue for this folder already."""
    rule = "has job {} in the queue ({}), and two jobs cannot train one run"
    fix = "scancel it first, or choose another folder"
    return [Problem(key, "queued", folder, rule.format(*job), fix) for job in queued]
