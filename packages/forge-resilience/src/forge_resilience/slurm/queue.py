"""Submitting a script from anywhere, also from inside another job."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

__all__ = ["clean_environ", "jobs_of", "submit"]

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


def jobs_of(script: str) -> list[tuple[str, str]]:
    """(id, state) of this user's jobs that were submitted from this script and have not ended; empty without Slurm."""
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
    return [(row[0], row[1]) for row in rows if len(row) == 3 and row[2] == script]
