"""forge-train as a real process: run it, wait for a step of it, kill it."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

_LIMIT_SECONDS = 120.0


class Outcome(NamedTuple):
    """`seconds` is processor time: on an idle machine close to the time a person waits, and the same
    on a busy one."""

    code: int
    out: str
    err: str
    seconds: float


def start(*args: str | Path, cwd: Path | None = None, **env: str) -> subprocess.Popen[str]:
    """`forge-train args...` in a process of its own, one thread, output piped."""
    return subprocess.Popen(
        [sys.executable, "-m", "forge_train", *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "NO_COLOR": "1", **env},
    )


def forge_train(*args: str | Path, cwd: Path | None = None, **env: str) -> Outcome:
    """Run to the end."""
    began = _children_seconds()
    process = start(*args, cwd=cwd, **env)
    out, err = process.communicate(timeout=_LIMIT_SECONDS)
    return Outcome(process.returncode, out, err, _children_seconds() - began)


def wait_for_step(process: subprocess.Popen[str], metrics: Path, step: int) -> None:
    """Return once metrics.jsonl holds a row of `step` or later, or the process has ended."""
    deadline = time.monotonic() + _LIMIT_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        if last_step(metrics) >= step:
            return
        time.sleep(0.002)  # polling a file; no test waits for a fixed time


def last_step(metrics: Path) -> int:
    try:
        lines = metrics.read_text().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except ValueError:
            continue
    return 0


def kill_after_step(
    process: subprocess.Popen[str], metrics: Path, step: int, sig: int = signal.SIGKILL
) -> Outcome:
    """Send `sig` once `step` is logged and wait for the end."""
    began = _children_seconds()
    wait_for_step(process, metrics, step)
    process.send_signal(sig)
    out, err = process.communicate(timeout=_LIMIT_SECONDS)
    return Outcome(process.returncode, out, err, _children_seconds() - began)


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
