"""The TCP store through which ranks find each other: rank 0 or torchrun hosts it, the others connect."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from datetime import timedelta
from typing import TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from forge_parallel._shared.problems import Problem, WithProblems, invalid
from forge_parallel.start.world import LOOPBACK, STORE_FD, World, is_loopback

T = TypeVar("T")

ANSWER_SECONDS = 30.0
"""Rank 0 opens its port and its store and checks in without a pause between: a listener that does not answer as a
store within this time is another service. It also bounds errors that waiting does not cure: an unknown host name, a
rank 0 that cannot reach itself. Late ranks have `start_timeout_seconds`."""

_OTHER_PORT = "another service holds the port: choose another MASTER_PORT"
_open: dict[tuple[str, int], TCPStore] = {}


class StartError(WithProblems, RuntimeError):
    """The ranks of a job did not find each other. The message names host, rank, address and cause.

    A runner maps it to an exit code of its own; nothing was computed and nothing written. `shared`: every
    rank that came raises it with the same cause, rank 0 among them, so one of them may print it.
    """

    def __init__(
        self, problems: Iterable[Problem] | str, where: str = "", shared: bool = False
    ) -> None:
        super().__init__(problems, where)
        self.shared = shared


def open_store(world: World, seconds: float) -> TCPStore:
    """The store at `world.address:world.port`, within `seconds`. Rank 0 hosts it unless torchrun does.

    It stays open until the process ends, so that a second group of the same processes meets there
    again. Raises StartError with the cause: port taken, host unknown, refused, no answer.
    """
    key = (world.address, world.port)
    if key not in _open:
        deadline = time.monotonic() + seconds
        # the launcher of local ranks opens the port before rank 0 has imported anything
        early = STORE_FD in os.environ
        hosts = world.rank == 0 and not agent_hosts()
        listening = (_inherited_socket(world.port) or _listen(world)) if hosts else None
        address = _reachable_address(world, deadline)
        left = max(1.0, deadline - time.monotonic())
        left = left if early else min(left, ANSWER_SECONDS)
        _open[key] = run_with_timeout(
            left,
            lambda: _connect(world, address, listening, seconds),
            Problem(
                "MASTER_PORT",
                "silent",
                world.port,
                f"at {world.address} does not answer as a store within {left:g} s",
                _OTHER_PORT,
            ),
        )
    return _open[key]


def agent_hosts() -> bool:
    """True if torchrun's agent hosts the store, even before rank 0 starts."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def run_with_timeout(seconds: float, function: Callable[[], T], otherwise: Problem) -> T:
    """`function()` in a thread of its own; StartError([otherwise]) if it has not returned in time.

    For calls into torch that have no timeout. The main thread goes on handling signals.
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
        raise StartError([otherwise]) from None


def _connect(
    world: World, address: str, listening: socket.socket | None, seconds: float
) -> TCPStore:
    try:
        return TCPStore(
            address,
            world.port,
            is_master=listening is not None,
            wait_for_workers=False,
            timeout=timedelta(seconds=seconds),
            master_listen_fd=None if listening is None else listening.detach(),
        )
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        rule = f"is where the store failed: {first}"
        raise invalid("MASTER_ADDR", "store", world.where, rule, kind=StartError) from error


def _listen(world: World) -> socket.socket:
    """A new socket on the world's port.

    Ours rather than the store's own, for the exact cause of a failure; on loopback if the job is on
    this host alone, since a store accepts every connection.
    """
    if is_loopback(world.address):
        host, both = world.address.replace("localhost", LOOPBACK), False
    else:
        host, both = "", socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, world.port), family=family, dualstack_ipv6=both)
    except OSError as error:
        cause = os.strerror(error.errno or 0)
        rule = f"cannot be opened: {cause}"
        fix = "another job or service may hold it: choose another MASTER_PORT"
        raise invalid("MASTER_PORT", "taken", world.port, rule, fix, kind=StartError) from error


def _inherited_socket(number: int) -> socket.socket | None:
    """The launcher's listening socket, once; None if there is none or it was lost on the way."""
    try:
        listening = socket.socket(fileno=int(os.environ.pop(STORE_FD, "")))
    except (ValueError, OSError):
        return None
    if listening.getsockname()[1:2] != (number,):
        listening.detach()  # a descriptor of another owner: do not close it
        return None
    listening.set_inheritable(False)
    return listening


def _reachable_address(world: World, deadline: float) -> str:
    """The numeric address that listens for the world's. Raises StartError with the cause if none does.

    torch's own attempt would print a stack per retry and call every cause a timeout. Rank 0 looks for
    itself, which finds a MASTER_ADDR of another host.
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
            found = Problem(
                "MASTER_ADDR", "unknown", world.where, f"is unknown ({error.strerror})", "check it"
            )
        except OSError as error:
            stop = soon if world.rank == 0 else deadline
            fix = "is it rank 0's host, and does rank 0 run?"
            rule = f"cannot be reached ({error.strerror or error})"
            found = Problem("MASTER_ADDR", "unreachable", world.where, rule, fix)
        if time.monotonic() >= stop:
            raise StartError([found], f"after {time.monotonic() - began:.0f} s")
        time.sleep(pause)
        pause = min(2 * pause, 0.5)
