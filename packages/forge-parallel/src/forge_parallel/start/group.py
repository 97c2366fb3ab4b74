"""Process group of a job: start it once per process, choose gloo's network interface, end the group and the process."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import socket
import struct
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed import Store

from forge_parallel._shared.problems import problems_of
from forge_parallel.start.rendezvous import leave_rendezvous, rendezvous
from forge_parallel.start.store import StartError, start_error
from forge_parallel.start.world import World

_INTERFACE = "GLOO_SOCKET_IFNAME"
_LOOPBACK_NAMES = ("lo", "lo0")
_SIOCGIFADDR = 0x8915  # Linux
_LOST = re.compile(r"Connection (closed|reset) by peer|Broken pipe|ncclRemoteError")
_started: tuple[World, Store, bool] | None = None  # the last: whether _INTERFACE was set here


def start_process_group(
    world: World,
    device: torch.device | str,
    *,
    timeout_seconds: float = 600.0,
    start_timeout_seconds: float = 300.0,
    facts: Mapping[str, str] = {},
) -> None:
    """Start the default process group: gloo on a CPU, gloo and NCCL on a GPU.

        start_process_group(find_world(), "cpu")
        ...
        end_process_group()

    Every rank calls it with the same arguments. Before any backend starts, the ranks check in with host, pid, device,
    torch version, world size and `facts` (for example a digest of the configuration); all but host and pid must be
    equal. One rank needs no port. May set GLOO_SOCKET_IFNAME until the end of the group (see `choose_interface`).

    timeout_seconds        of each later collective; long enough for the slowest rank's checkpoint or evaluation
    start_timeout_seconds  for all ranks to check in; nodes of a large job start minutes apart

    Raises StartError on every present rank if a rank is absent, facts differ, two ranks use one GPU, the port is taken,
    the address is unreachable, or a group is running. Cost: a dozen small messages per rank through a TCP store on
    rank 0 (or in torchrun's agent), which exists until rank 0's process ends.
    """
    global _started
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if dist.is_initialized():
        rule = f"of {dist.get_world_size()} ranks is running already"
        where = f"rank {world.rank}"
        raise start_error("process group", "running", ..., rule, "end it first", where=where)

    chosen = False
    try:
        store, rank_0 = rendezvous(world, device, start_timeout_seconds, facts)
        # gloo reads the variable when the backend starts
        chosen = choose_interface(rank_0)
        init_backends(store, world.rank, world.world_size, device, timeout_seconds)
    except (RuntimeError, ValueError) as error:
        if chosen:
            release_interface()
        where = f"rank {world.rank} of {world.world_size} on host {socket.gethostname()}, meeting at {world.where}"
        if isinstance(error, StartError):
            where = f"{where}: {error.where}" if error.where else where
            raise StartError(problems_of(error), where, error.shared) from error
        rule = f"came and cannot connect: {str(error).splitlines()[0]}"
        raise start_error("ranks", "connect", ..., rule, where=where) from error
    _started = world, store, chosen


def init_backends(
    store: Store, rank: int, world_size: int, device: torch.device, timeout_seconds: float
) -> None:
    """Start torch's default process group on a store: gloo, and NCCL if `device` is a GPU."""
    on_gpu = device.type == "cuda"
    # gloo next to NCCL: collectives of host tensors (CPU offload, votes) need it on GPUs too
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_seconds),
        device_id=device if on_gpu else None,
    )


def end_process_group(wait: bool = True) -> None:
    """Destroy the group that `start_process_group` started; do nothing if it did not.

    Rank 0 stays up to 5 s until the others have ended theirs, since it hosts their store. With `wait` False, after an
    error, no rank waits.
    """
    global _started
    if _started is None:
        return
    (world, store, chosen), _started = _started, None
    # the backends use the store until they are destroyed, so rank 0 leaves it afterwards
    if dist.is_initialized():
        dist.destroy_process_group()
    if chosen:
        release_interface()
    if wait and world.world_size > 1:
        leave_rendezvous(world, store)


def lost_rank(error: BaseException) -> str | None:
    """Return the backend's message in `error` if it means that another rank is gone, else None.

        except RuntimeError as error:
            if lost_rank(error): ...

    A lost connection does not show the cause, which the other rank or its launcher reports. A time-out returns None:
    its traceback shows the collective in which this rank waits.
    """
    text = str(error)
    of_a_group = isinstance(error, dist.DistError) or "gloo" in text
    found = _LOST.search(text) if isinstance(error, RuntimeError) and of_a_group else None
    return found and found[0]


def leave(code: int) -> NoReturn:
    """End this process with `code`, without the interpreter's shutdown: the last line of a rank, `leave(main())`.

    Runs the functions registered with `atexit` (logging and multiprocessing clean up there) and flushes stdout and
    stderr. Does not wait for threads, daemons or not.

    `sys.exit` would not do: a gloo worker thread that still holds a tensor while the interpreter finalizes ends the
    process with SIGABRT (about 1 in 6 with torch 2.13), and the exit code is lost.
    """
    try:
        with contextlib.suppress(Exception):
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # closed, or a pipe without a reader
                stream.flush()
    finally:
        os._exit(code)


def choose_interface(address: str | None) -> bool:
    """Set GLOO_SOCKET_IFNAME if gloo's own choice, the address of the host name, is wrong. Return whether it was set.

    A value of the user is kept. `address` None: all ranks are on this host, so loopback works without any host name.
    Otherwise the ranks are on several hosts and reach rank 0 at `address`. If this host's own name means loopback
    (Debian's 127.0.1.1) or nothing, gloo would publish an address that leads other hosts to themselves; the interface
    that leads to `address` is used instead (IPv4, Linux).
    """
    if _INTERFACE in os.environ:
        return False
    if address is None:
        name = next((name for _, name in socket.if_nameindex() if name in _LOOPBACK_NAMES), None)
    else:
        name = None if _host_name_is_reachable() else _interface_towards(address)
    if name is not None:
        os.environ[_INTERFACE] = name
    return name is not None


def release_interface() -> None:
    """Unset the variable that `choose_interface` set, GLOO_SOCKET_IFNAME."""
    os.environ.pop(_INTERFACE, None)


def _host_name_is_reachable() -> bool:
    """Whether this host's name means an address of this host that other hosts may reach."""
    try:
        address = socket.gethostbyname(socket.gethostname())
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
            own.bind((address, 0))
    except OSError:
        return False
    return not address.startswith("127.")


def _interface_towards(address: str) -> str | None:
    """Name of the interface through which packets to `address` leave; None if it is loopback."""
    if not sys.platform.startswith("linux"):
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as packet:
        try:
            packet.connect((address.removeprefix("::ffff:"), 9))  # sends nothing
        except OSError:
            return None
        local = packet.getsockname()[0]
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(packet, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # an interface without an address
                continue
            # bytes 20 to 23 of a struct ifreq are the IPv4 address
            if socket.inet_ntoa(answer[20:24]) == local:
                return None if name in _LOOPBACK_NAMES else name
    return None
