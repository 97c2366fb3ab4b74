"""`forge-train run` in forks of this process, which has imported everything: a life costs tenths of a second.

The launcher and its ranks are real processes with real signals; only exec and the imports behind it are left out.
The process that forks runs nothing of torch itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from forge_testing.warm import end_of

from .suites import EVERY, JOB, STEPS

_Popen = subprocess.Popen
_PR_SET_CHILD_SUBREAPER = 36
_MODULES = (
    "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor",
    "forge_train.cli", "forge_train.loop.trainer", "forge_train.report.summary", "forge_train.config.flags",
    "forge_train.report.describe", "forge_core.flops",
)  # fmt: skip


def prepare() -> None:
    """Import what a run needs, once, and adopt the orphans of lives."""
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", NO_COLOR="1", COLUMNS="200")
    import torch

    torch.set_num_threads(1)
    for name in _MODULES:
        importlib.import_module(name)
    from forge_train import load_job

    with tempfile.TemporaryDirectory() as folder:  # what is parsed once is cached for all lives
        job = Path(folder) / "job.toml"
        job.write_text(JOB.format(run_dir=Path(folder) / "run", steps=STEPS, every=EVERY))
        load_job(job, {"checkpoint.wait": True})
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    gc.collect()
    gc.freeze()


class ForkedLife:
    """One run of a command line, in a session of its own; the `Life` of forge_resilience.chaos.

    `plant` is called in each rank, with its number, before it begins. Output of all goes to `output`.
    """

    def __init__(
        self,
        args: Sequence[str | Path],
        environ: Mapping[str, str],
        folder: Path,
        output: Path,
        plant: Callable[[int], None] | None = None,
        launcher: str = "forge",
        nproc: int = 1,
    ) -> None:
        self._pids = folder / "pids"
        self._pids.mkdir(parents=True, exist_ok=True)
        for old in self._pids.iterdir():
            old.unlink()
        self.code: int | None = None
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            null = os.open(os.devnull, os.O_RDONLY)
            for number, descriptor in enumerate((null, log, log)):
                os.dup2(descriptor, number)
            os.closerange(3, 256)
            _Forked.pids, _Forked.plant = self._pids, plant
            subprocess.Popen = _Forked  # type: ignore[misc, assignment]
            if launcher == "torchrun":
                _torchrun(list(map(str, args)), nproc, {**os.environ, **environ})
            if "RANK" not in environ and "--nproc" not in args:
                (self._pids / "0").write_text(str(os.getpid()))
                _become(list(map(str, args)), {**os.environ, **environ}, plant)
            _become(list(map(str, args)), {**os.environ, **environ})

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code

    def ranks(self) -> dict[int, int]:
        """Rank -> pid."""
        found = {}
        for path in self._pids.iterdir():
            with contextlib.suppress(ValueError, OSError):  # being written, or renamed
                found[int(path.name)] = int(path.read_text())
        return found

    def living(self) -> list[int]:
        """Processes of its session but the first; orphans that ended are collected."""
        found = []
        for process in Path("/proc").iterdir():
            if not process.name.isdigit() or int(process.name) == self.pid:
                continue
            try:
                fields = (process / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) != self.pid:
                continue
            if fields[0] != "Z":
                found.append(int(process.name))
            elif int(fields[1]) == os.getpid():
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(int(process.name), os.WNOHANG)
        return found


class _Forked:
    """`subprocess.Popen` of `python -m forge_train ...`, as a fork of the launcher."""

    pids: Path
    plant: Callable[[int], None] | None

    def __new__(cls, command: Any, *args: Any, **others: Any) -> Any:
        if "forge_train" not in list(command)[:4]:
            return _Popen(command, *args, **others)
        return super().__new__(cls)

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        stdin: Any = None,
        pass_fds: Sequence[int] = (),
        preexec_fn: Callable[[], None] | None = None,
        **others: Any,
    ) -> None:
        self.args, self.returncode = command, None
        signals = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self.pid = os.fork()
        if self.pid == 0:
            for number in signal.valid_signals():
                with contextlib.suppress(OSError, ValueError):
                    if signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN):
                        signal.signal(number, signal.SIG_DFL)
            if others.get("start_new_session"):
                os.setpgid(0, 0)  # the session tells what belongs to this life
            keep = sorted({2, *pass_fds})
            for before, after in zip(keep, [*keep[1:], 256]):
                os.closerange(before + 1, after)
            signal.pthread_sigmask(signal.SIG_SETMASK, signals)
            if preexec_fn is not None:
                preexec_fn()
            subprocess.Popen = _Popen  # type: ignore[misc]
            environ = dict(env or os.environ)
            rank = int(environ.get("RANK", "0"))
            new = self.pids / f".{rank}"
            new.write_text(str(os.getpid()))
            new.rename(self.pids / str(rank))
            _become(
                list(command[list(command).index("forge_train") + 1 :]), environ, type(self).plant
            )
        signal.pthread_sigmask(signal.SIG_SETMASK, signals)

    def poll(self) -> int | None:
        if self.returncode is None:
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def _torchrun(args: list[str], nproc: int, environ: Mapping[str, str]) -> None:
    """torch's own agent in this process; its workers are forks, too."""
    from torch.distributed.run import main

    os.environ.clear()
    os.environ.update(environ)
    code = 0
    try:
        main(["--standalone", f"--nproc-per-node={nproc}", "--module", "forge_train", *args])
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException as error:
        print(f"torchrun: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        code = 1
    os._exit(code)


def _become(
    args: list[str], environ: Mapping[str, str], plant: Callable[[int], None] | None = None
) -> None:
    """`forge-train args`, and the end of this process."""

    def work() -> None:
        os.environ.clear()
        os.environ.update(environ)
        sys.argv[:] = ["forge-train", *args]
        from forge_resilience.rank_process import early_stop
        from forge_train import cli

        if plant is not None:  # before anything of the run
            plant(int(environ.get("RANK", "0")))
        early_stop.announce = environ.get("RANK", "0") == "0"
        cli.main(args)

    os._exit(end_of(work))


def in_child(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` in a fork, as JSON; torch may run there. RuntimeError with its traceback if it raised."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            answer = {"value": function(*args)}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        with os.fdopen(writing, "w") as pipe:
            json.dump(answer, pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    answer = json.loads(text) if text else {"error": "the child died"}
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer["value"]
