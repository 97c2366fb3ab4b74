"""Run a function in forked processes of this host, with gloo between them, on GPUs also NCCL.

A fork costs a tenth of a second and shares the caller's objects. Five rules make it safe:

- A child first sets torch to one thread. The caller's thread pool does not exist in it, and torch would wait for it.
- It ends with `os._exit`.
- It never collects the caller's garbage: a gloo group there joins threads that do not exist, and hangs or dies.
- The caller clears DTensor's caches, which would return names of groups that have ended.
- The caller must not have used CUDA, which does not survive a fork: even the number of GPUs is read in a child.
"""

from __future__ import annotations

import gc
import multiprocessing.connection as connections
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from forge_parallel._shared.problems import Problem, Shown, problems_of, show
from forge_parallel._torch_compat import clear_sharding_caches
from forge_parallel.prove.settings import make_deterministic
from forge_parallel.start.group import choose_interface, init_backends

# After a rank has failed, the others wait in a collective for it. A rank that fails by itself does so within this time,
# so its own error is reported too.
_GRACE_SECONDS = 2.0


class ExitStatus(NamedTuple):
    """End of a rank: "returned" with its value, the name of an exception's class with its text, or "lost" (killed, or
    not back in time) with a reason. `at` is the time of an exception; values in `problems` are text."""

    kind: str
    value: Any
    at: float = float("inf")
    trace: str = ""
    problems: tuple[Problem, ...] = ()

    def __str__(self) -> str:
        return self.value if self.kind == "lost" else f"it raised {self.kind}: {self.value}"


def run_on_ranks(
    world: int, function: Callable[[torch.device], Any], timeout: float, device: str = "cpu"
) -> list[ExitStatus]:
    """Run `function(device)` in `world` forked processes with deterministic settings; exit statuses by rank.

    The device is the CPU or, for "cuda", the GPU of the rank's number. More than one process get a process group.
    Results are pickled; what ranks print is lost. A rank is killed if it has not returned after `timeout` seconds, or
    soon after another one failed.
    """
    clear_sharding_caches()
    with tempfile.TemporaryDirectory(prefix="forge-prove-") as folder:
        links, pids = {}, []
        for rank in range(world):
            links[rank], theirs = connections.Pipe()
            pids.append(_fork())
            if pids[-1] == 0:
                where = torch.device(device, rank) if device == "cuda" else torch.device(device)
                _run_rank(theirs, rank, world, Path(folder), function, where)
            theirs.close()  # else the end of a dead rank's pipe would not be seen

        try:
            return _collect(links, timeout)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)  # not yet waited for, so the pid is still its own
                os.waitpid(pid, 0)


def _fork() -> int:
    """`os.fork` with every object of the caller exempt from garbage collection in the child."""
    collects = gc.isenabled()
    gc.disable()  # it could run in the child before `freeze`
    try:
        pid = os.fork()
        if pid == 0:
            gc.freeze()
        return pid
    finally:
        if collects:
            gc.enable()


def _collect(links: dict[int, Any], timeout: float) -> list[ExitStatus]:
    """Wait for the exit statuses that ranks send over `links`; a rank without one is "lost"."""
    found: dict[int, ExitStatus] = {}
    waiting, deadline = dict(links), time.monotonic() + timeout
    while ready := connections.wait(waiting.values(), max(0.0, deadline - time.monotonic())):
        for rank in [rank for rank, link in waiting.items() if link in ready]:
            try:
                found[rank] = pickle.loads(waiting.pop(rank).recv_bytes())
            except (EOFError, OSError):
                found[rank] = ExitStatus("lost", "its process died")
            if found[rank].kind != "returned":
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        if not waiting:
            break
    late = ExitStatus("lost", f"it did not return within {timeout:g} s")
    return [found.get(rank, late) for rank in links]


def _run_rank(
    link: Any,
    rank: int,
    world: int,
    folder: Path,
    function: Callable[[torch.device], Any],
    device: torch.device,
) -> NoReturn:
    """Body of a child: set it up, run `function`, send the exit status, and end."""
    try:
        torch.set_num_threads(1)
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, 1)
        os.dup2(devnull, 2)
        make_deterministic()
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # workers outlive a killed rank

        if device.type == "cuda":
            torch.cuda.set_device(device)
        if world > 1:
            choose_interface(None)
            store = dist.FileStore(str(folder / "store"), world)
            # by default a rank that hangs is killed at the cell's timeout, 60 or 300 s, before this one
            init_backends(store, rank, world, device, 600.0)
        status = ExitStatus("returned", function(device))
        if world > 1:
            dist.barrier()  # a rank that exits early resets connections from which others still read
    except BaseException as error:
        # another process can read the problems whatever their values are
        problems = tuple(
            p if p.value is ... else replace(p, value=Shown(show(p.value)))
            for p in problems_of(error)
        )
        kind, trace = type(error).__name__, traceback.format_exc()
        status = ExitStatus(kind, str(error), time.monotonic(), trace, problems)
    try:
        link.send_bytes(pickle.dumps(status))
    finally:
        os._exit(0)
