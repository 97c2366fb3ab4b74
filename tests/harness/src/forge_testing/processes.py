"""forge-train as a real process: run it, wait for a step of it, kill it. Processes whose parent dies."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from forge_testing.warm import WarmProcess

_LIMIT_SECONDS = 120.0

#: A program of a rank: one all-reduce on CPUs, then a line with launcher, rank, ranks and the sum.
ALL_REDUCE = """
import sys
import torch
import torch.distributed as dist
from forge_parallel.start import end_process_group, find_world, leave, start_process_group
world = find_world()
start_process_group(world, "cpu", start_timeout_seconds=60)
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
sys.stdout.write(f"{world.launcher} {world.rank}/{world.world_size} {total.item()}\\n")
end_process_group()
leave(0)
"""


class Outcome(NamedTuple):
    """How a process ended, and what it printed."""

    code: int
    out: str
    err: str


def start(*args: str | Path, cwd: Path | None = None, **env: str) -> subprocess.Popen[str]:
    """`forge-train args...` in a process of its own, one thread, output piped."""
    return subprocess.Popen(
        [sys.executable, "-m", "forge_train", *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env=_environ(env),
    )


def _environ(more: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "NO_COLOR": "1", **more}


def forge_train(*args: str | Path, cwd: Path | None = None, **env: str) -> Outcome:
    """Run `forge-train args...` to the end, in a fork of a process that has imported what a run needs:
    seconds less than `start`, where a new interpreter imports it again."""
    told = _warm().call(
        "forge_train.cli:main",
        [str(arg) for arg in args],
        folder=cwd or Path.cwd(),
        environ=_environ(env),
        limited=False,
    )
    return Outcome(told.code, told.out, told.err)


@functools.cache
def _warm() -> WarmProcess:
    return WarmProcess(
        "forge_train.cli", "forge_train.loop.trainer", "forge_lab.text",
        "forge_train.report.summary", "forge_train.doctor",
    )  # fmt: skip


def forked(work: Callable[[], object]) -> int:
    """The pid of a fork that does some work: it ends with code 0, or 1 and a traceback if that raises."""
    pid = os.fork()
    if not pid:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return pid


def exit_code(pid: int) -> int:
    """Wait for a child; a negative code is a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def wait_for_step(process: subprocess.Popen[str], metrics: Path, step: int, saved: int = 0) -> None:
    """Return once metrics.jsonl holds a row of `step` or later and `saved` is committed, or the process has ended.

    Saves are written in the background: on a busy machine many steps pass before one is committed.
    """
    deadline = time.monotonic() + _LIMIT_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        committed = saved == 0 or (metrics.parent / f"checkpoints/step-{saved:08}").exists()
        if committed and last_step(metrics) >= step:
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
    process: subprocess.Popen[str],
    metrics: Path,
    step: int,
    sig: int = signal.SIGKILL,
    saved: int = 0,
) -> Outcome:
    """Send `sig` once `step` is logged and `saved` is committed, and wait for the end."""
    wait_for_step(process, metrics, step, saved)
    process.send_signal(sig)
    out, err = process.communicate(timeout=_LIMIT_SECONDS)
    return Outcome(process.returncode, out, err)


def orphan_code(monkeypatch: Any, start: Callable[[], object]) -> int:
    """Exit code of a process that `start` makes by subprocess, if its parent dies before the `preexec_fn`: 0 if it goes on.

    This process adopts it, as a supervisor does, so its parent is never process 1. Linux.
    """
    from forge_resilience.procfs import adopt_orphans

    made: list[Callable[[], None]] = []

    def popen(*args: object, preexec_fn: Callable[[], None], **kwargs: object) -> None:
        made.append(preexec_fn)
        raise OSError

    monkeypatch.setattr(subprocess, "Popen", popen)
    adopt_orphans()
    parent = os.fork()
    if parent == 0:
        os.setpgid(0, 0)  # by which the orphan is found
        with contextlib.suppress(OSError):
            start()
        maker = os.getpid()
        if os.fork() == 0:
            while os.getppid() == maker:
                os.sched_yield()
            made[0]()
        os._exit(0)

    os.waitpid(parent, 0)
    code = os.waitstatus_to_exitcode(os.waitpid(-parent, 0)[1])
    adopt_orphans(False)
    return code
