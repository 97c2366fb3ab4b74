"""A function in each of some forked gloo processes of this host.

A fork costs a tenth of a second and shares the caller's objects. Four rules make it safe. A child sets torch to one
thread first: the threads of the caller's pool do not exist in it, and torch would wait for them. It ends with
`os._exit`. It never collects the caller's garbage: a gloo group there joins threads that do not exist, and hangs or
dies. And the caller clears DTensor's caches, which would return names of groups that have ended.
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
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from forge_parallel._torch_compat import clear_sharding_caches
from forge_parallel.start.interface import choose_interface

_GRACE_SECONDS = 2.0  # for ranks that wait in a collective for one that has ended


class Outcome(NamedTuple):
    """The end of a rank: "returned" with its value, the name of an exception's class with its text, or "lost". `at` is
    the time, `trace` the traceback."""

    kind: str
    value: Any
    at: float = float("inf")
    trace: str = ""


def run_on_ranks(world: int, function: Callable[[], Any], timeout: float) -> list[Outcome]:
    """`function()` in `world` processes with a gloo group (none for one process); outcomes by rank.

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
                _be_rank(theirs, rank, world, Path(folder), function)
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
    link: Any, rank: int, world: int, folder: Path, function: Callable[[], Any]
) -> NoReturn:
    try:
        torch.set_num_threads(1)
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, 1)
        os.dup2(devnull, 2)
        if world > 1:
            choose_interface(None)
            store = dist.FileStore(str(folder / "store"), world)  # type: ignore[attr-defined]
            limit = timedelta(minutes=10)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
        outcome = Outcome("returned", function())
        if world > 1:
            dist.barrier()  # a rank that exits early resets connections from which others still read
    except BaseException as error:
        kind, text = type(error).__name__, str(error)
        outcome = Outcome(kind, text, time.monotonic(), traceback.format_exc())
    try:
        link.send_bytes(pickle.dumps(outcome))
    finally:
        os._exit(0)
