"""A function in each of some forked processes of this host, with gloo, on GPUs NCCL beside it.

A fork costs a tenth of a second and shares the caller's objects. Five rules make it safe. A child sets torch to one
thread first: the threads of the caller's pool do not exist in it, and torch would wait for them. It ends with
`os._exit`. It never collects the caller's garbage: a gloo group there joins threads that do not exist, and hangs or
dies. The caller clears DTensor's caches, which would return names of groups that have ended. And it must not have used CUDA,
which does not survive a fork: even the number of GPUs is asked for in a child.
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
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from forge_parallel._shared.problems import Problem, Shown, problems_of, show
from forge_parallel._torch_compat import clear_sharding_caches
from forge_parallel.prove.settings import make_deterministic
from forge_parallel.start.interface import choose_interface

_GRACE_SECONDS = 2.0  # for ranks that wait in a collective for one that has ended


class Outcome(NamedTuple):
    """The end of a rank: "returned" with its value, the name of an exception's class with its text, or "lost". `at` is
    the time, `trace` the traceback, `problems` those of the exception, with their values as text."""

    kind: str
    value: Any
    at: float = float("inf")
    trace: str = ""
    problems: tuple[Problem, ...] = ()


def run_on_ranks(
    world: int, function: Callable[[torch.device], Any], timeout: float, device: str = "cpu"
) -> list[Outcome]:
    """`function(its device)` in `world` processes with a group (none for one process); outcomes by rank.

    The device is the CPU, or on "cuda" the GPU with the rank's number, and the group has gloo and NCCL. Settings are
    deterministic.

    Values are pickled, printed text is lost. A rank that has not returned after `timeout` seconds, or
    soon after another failed, is killed.
    """
    clear_sharding_caches()
    with tempfile.TemporaryDirectory(prefix="forge-prove-") as folder:
        links, pids = {}, []
        for rank in range(world):
            links[rank], theirs = connections.Pipe()
            pids.append(_fork())
            if pids[-1] == 0:
                where = torch.device(device, rank) if device == "cuda" else torch.device(device)
                _be_rank(theirs, rank, world, Path(folder), function, where)
            theirs.close()
        try:
            return _gather(links, timeout)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)  # not yet waited for, so the pid is still its own
                os.waitpid(pid, 0)


def _fork() -> int:
    """`os.fork`; the garbage collector of the child passes over all that the caller has made."""
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


def _gather(links: dict[int, Any], timeout: float) -> list[Outcome]:
    outcomes: dict[int, Outcome] = {}
    waiting, deadline = dict(links), time.monotonic() + timeout
    while ready := connections.wait(waiting.values(), max(0.0, deadline - time.monotonic())):
        for rank in [rank for rank, link in waiting.items() if link in ready]:
            try:
                outcomes[rank] = pickle.loads(waiting.pop(rank).recv_bytes())
            except (EOFError, OSError):
                outcomes[rank] = Outcome("lost", "its process died")
            if outcomes[rank].kind != "returned":
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        if not waiting:
            break
    late = Outcome("lost", f"it did not return within {timeout:g} s")
    return [outcomes.get(rank, late) for rank in links]


def _be_rank(
    link: Any,
    rank: int,
    world: int,
    folder: Path,
    function: Callable[[torch.device], Any],
    device: torch.device,
) -> NoReturn:
    try:
        torch.set_num_threads(1)
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, 1)
        os.dup2(devnull, 2)
        make_deterministic()
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # workers outlive a killed rank
        on_gpu = device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(device)
        if world > 1:
            choose_interface(None)
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
                store=dist.FileStore(str(folder / "store"), world),  # type: ignore[attr-defined]
                rank=rank,
                world_size=world,
                timeout=timedelta(minutes=10),
                device_id=device if on_gpu else None,
            )
        outcome = Outcome("returned", function(device))
        if world > 1:
            dist.barrier()  # a rank that exits early resets connections from which others still read
    except BaseException as error:
        kind, text = type(error).__name__, str(error)
        outcome = Outcome(kind, text, time.monotonic(), traceback.format_exc(), _portable(error))
    try:
        link.send_bytes(pickle.dumps(outcome))
    finally:
        os._exit(0)


def _portable(error: BaseException) -> tuple[Problem, ...]:
    """The problems of an error, which another process can read whatever their values are."""
    return tuple(
        p if p.value is ... else replace(p, value=Shown(show(p.value))) for p in problems_of(error)
    )
