"""TCP store through which ranks find each other: rank 0 or torchrun hosts it, the others connect."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import TypeVar

from torch.distributed import TCPStore

from forge_parallel._shared.launch import LOOPBACK, STORE_FD
from forge_parallel._shared.problems import Problem, WithProblems, invalid
from forge_parallel.start.world import World, is_loopback

T = TypeVar("T")

ANSWER_SECONDS = 30.0
"""Limit for errors that do not go away by waiting. Rank 0 opens its port and its store and checks in without a pause, so
a listener that does not answer as a store within this time is another service. The same holds for an unknown host name
and a rank 0 that cannot reach itself. Late ranks have `start_timeout_seconds`."""

_OTHER_PORT = "another service holds the port: choose another MASTER_PORT"
_open: dict[tuple[str, int], TCPStore] = {}


class StartError(WithProblems, RuntimeError):
    """The ranks of a job did not find each other. The message names host, rank, address and cause.

    Nothing was computed or written; a runner gives it an exit code of its own. `shared`: every present rank raises it
    with the same cause, rank 0 among them, so it is enough that one of them prints it.
    """

    def __init__(
        self, problems: Iterable[Problem] | str, where: str = "", shared: bool = False
    ) -> None:
        super().__init__(problems, where)
        self.shared = shared


#: `raise start_error(key, code, value, rule, fix)`: a StartError with this one problem.
start_error = partial(invalid, kind=StartError)


def open_store(world: World, seconds: float) -> TCPStore:
    """Return the store at `world.address:world.port`, within `seconds`. Rank 0 hosts it unless torchrun does.

    It stays open until the process ends, so that a second group of the same processes meets there again. Raises
    StartError with the cause: port taken, host unknown, connection refused, no answer.
    """
    key = (world.address, world.port)
    if key in _open:
        return _open[key]
    deadline = time.monotonic() + seconds
    # the launcher of local ranks opens the port before rank 0 has imported torch: a late answer is no other service
    is_early = STORE_FD in os.environ
    is_host = world.rank == 0 and not agent_hosts()
    listening = (_inherited_socket(world.port) or _listen(world)) if is_host else None
    address = _reachable_address(world, deadline)

    # a store that listens just before the deadline has a second to answer
    left = max(1.0, deadline - time.monotonic())
    left = left if is_early else min(left, ANSWER_SECONDS)
    rule = f"at {world.address} does not answer as a store within {left:g} s"
    silent = Problem("MASTER_PORT", "silent", world.port, rule, _OTHER_PORT)
    _open[key] = run_with_timeout(
        left, lambda: _connect(world, address, listening, seconds), silent
    )
    return _open[key]


def agent_hosts() -> bool:
    """Whether torchrun's agent hosts the store. It does so even before rank 0 starts."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def run_with_timeout(seconds: float, function: Callable[[], T], late: Problem) -> T:
    """Return `function()`, run in a thread. Raises StartError([late]) if it has not returned in time.

    For calls into torch that have no timeout; the main thread can handle signals meanwhile.
    """
    future: Future[T] = Future()

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=call, name="forge-start", daemon=True).start()
    try:
        return future.result(seconds)
    except TimeoutError:
        # the thread stays in torch; as a daemon it does not keep the process
        raise StartError([late]) from None


def _connect(
    world: World, address: str, listening: socket.socket | None, seconds: float
) -> TCPStore:
    """Connect to the store at an address, and host it on the socket `listening` if there is one."""
    try:
        # not `wait_for_workers`: the check-in waits for the ranks, and names those that are absent
        return TCPStore(
            address,
            world.port,
            is_master=listening is not None,
            wait_for_workers=False,
            timeout=timedelta(seconds=seconds),
            master_listen_fd=None if listening is None else listening.detach(),
        )
    except RuntimeError as error:
        rule = f"is where the store failed: {str(error).splitlines()[0]}"
        raise start_error("MASTER_ADDR", "store", world.where, rule) from error


def _listen(world: World) -> socket.socket:
    """Open a socket on the world's port, on loopback only if all ranks are on this host: a store accepts every client.

    The store would open one itself, and its error would not show the cause.
    """
    if is_loopback(world.address):
        host, both = world.address.replace("localhost", LOOPBACK), False
    else:
        host, both = "", socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, world.port), family=family, dualstack_ipv6=both)
    except OSError as error:
        rule = f"cannot be opened: {os.strerror(error.errno or 0)}"
        fix = "another job or service may hold it: choose another MASTER_PORT"
        raise start_error("MASTER_PORT", "taken", world.port, rule, fix) from error


def _inherited_socket(port: int) -> socket.socket | None:
    """Return the launcher's listening socket, at the first call; None without one on this port."""
    try:
        listening = socket.socket(fileno=int(os.environ.pop(STORE_FD, "")))
    except (ValueError, OSError):
        return None
    if listening.getsockname()[1:2] != (port,):
        listening.detach()  # a descriptor of another owner: do not close it
        return None
    listening.set_inheritable(False)
    return listening


def _reachable_address(world: World, deadline: float) -> str:
    """Return the numeric address that accepts connections for the world's. Raises StartError with the cause at the end.

    torch's own attempt would print a stack per retry and report every cause as a timeout. Rank 0 connects to itself,
    which finds a MASTER_ADDR of another host.
    """
    began, pause = time.monotonic(), 0.01
    soon = min(deadline, began + ANSWER_SECONDS)
    while True:
        try:
            left = max(0.1, deadline - time.monotonic())
            with socket.create_connection((world.address, world.port), timeout=left) as peer:
                return str(peer.getpeername()[0])
        except socket.gaierror as error:
            stop = soon
            rule = f"is unknown ({error.strerror})"
            found = Problem("MASTER_ADDR", "unknown", world.where, rule, "check it")
        except OSError as error:
            # others wait for a rank 0 that starts late
            stop = soon if world.rank == 0 else deadline
            rule = f"cannot be reached ({error.strerror or error})"
            fix = "is it rank 0's host, and does rank 0 run?"
            found = Problem("MASTER_ADDR", "unreachable", world.where, rule, fix)

        if time.monotonic() >= stop:
            raise StartError([found], f"after {time.monotonic() - began:.0f} s")
        # local ranks wait milliseconds for rank 0; the ranks of many nodes must not flood it
        time.sleep(pause)
        pause = min(2 * pause, 0.5)
