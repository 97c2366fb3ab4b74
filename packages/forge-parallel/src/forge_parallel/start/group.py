"""The process group of a job, started once per process and ended once, and the end of the process."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import socket
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from forge_parallel._shared.problems import invalid, problems_of
from forge_parallel.start.interface import choose_interface, release_interface
from forge_parallel.start.rendezvous import leave_rendezvous, rendezvous
from forge_parallel.start.store import StartError
from forge_parallel.start.world import World

_GONE = re.compile(r"Connection (closed|reset) by peer|Broken pipe|ncclRemoteError")
_started: tuple[World, Store, bool] | None = None  # whether the interface was chosen here


def start_process_group(
    world: World,
    device: torch.device | str,
    *,
    timeout_seconds: float = 600.0,
    start_timeout_seconds: float = 300.0,
    facts: Mapping[str, str] = {},
) -> None:
    """Start the default process group: gloo on a CPU, gloo and NCCL on a GPU.

    Every rank calls it with the same arguments. Before any backend starts, the ranks check in with
    host, pid, device, torch version, world size and `facts` (a digest of the configuration, say), all
    of which but host and pid must agree. `timeout_seconds` bounds each later collective,
    `start_timeout_seconds` the time in which all ranks must have come. One rank needs no port. May set
    GLOO_SOCKET_IFNAME until the end of the group (see `choose_interface`).

    Raises StartError, on every rank that came, when a rank did not, when facts differ, when two ranks
    use one GPU, when the port is taken or the address unreachable, and when a group is running.
    Cost: a dozen small messages a rank through a TCP store on rank 0 (or in torchrun's agent), which
    lives as long as rank 0's process.
    Usage: `start_process_group(find_world(), "cpu"); ...; end_process_group()`.
    """
    global _started
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if dist.is_initialized():
        rule = f"of {dist.get_world_size()} ranks is running already"
        where = f"rank {world.rank}"
        raise invalid(
            "process group", "running", ..., rule, "end it first", where=where, kind=StartError
        )
    chosen = False
    try:
        store, rank_0 = rendezvous(world, device, start_timeout_seconds, facts)
        chosen = choose_interface(rank_0)
        # gloo beside NCCL: collectives of host tensors (CPU offload, votes) need it on GPUs, too
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=world.rank,
            world_size=world.world_size,
            timeout=timedelta(seconds=timeout_seconds),
            device_id=device if device.type == "cuda" else None,
        )
    except (RuntimeError, ValueError) as error:
        if chosen:
            release_interface()
        where = f"rank {world.rank} of {world.world_size} on host {socket.gethostname()}, meeting at {world.where}"
        if isinstance(error, StartError):
            where = f"{where}: {error.where}" if error.where else where
            raise StartError(problems_of(error), where, error.shared) from error
        rule = f"came and cannot connect: {str(error).splitlines()[0]}"
        raise invalid("ranks", "connect", ..., rule, where=where, kind=StartError) from error
    _started = world, store, chosen


def end_process_group(wait: bool = True) -> None:
    """Destroy the group that `start_process_group` started; do nothing if it did not.

    Rank 0 stays up to 5 s until the others have ended theirs, since it hosts their store; after an
    error, with `wait` False, nobody waits for anybody.
    """
    global _started
    if _started is None:
        return
    (world, store, chosen), _started = _started, None
    if dist.is_initialized():
        dist.destroy_process_group()
    if chosen:
        release_interface()
    if wait and world.world_size > 1:
        leave_rendezvous(world, store)


def lost_rank(error: BaseException) -> str | None:
    """The backend's message in `error` if it means that another rank is gone, else None.

    A lost connection does not show the cause, which the other rank or its launcher reports. A time-out returns None,
    since its traceback shows where this rank waits. Usage: `except RuntimeError as error:
    if lost_rank(error): ...`.
    """
    text = str(error)
    of_a_group = isinstance(error, dist.DistError) or "gloo" in text
    found = _GONE.search(text) if isinstance(error, RuntimeError) and of_a_group else None
    return found and found[0]


def leave(code: int) -> NoReturn:
    """End this process with `code` and skip the interpreter's shutdown.

    Runs the functions registered with `atexit` (logging and multiprocessing clean up there), flushes
    stdout and stderr, and ends. Threads that are no daemons are not waited for.

    Why not `sys.exit`: a gloo worker thread that still holds a tensor while the interpreter finalises
    takes the process down with SIGABRT (about 1 in 6 with torch 2.13), and the exit code with it.
    Usage: the last line of a rank, `leave(main())`.
    """
    try:
        with contextlib.suppress(Exception):
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # closed, or a pipe without a reader
                stream.flush()
    finally:
        os._exit(code)
