"""Workers of one job on this host: started, signalled and ended as one."""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from forge_resilience._renamed import renamed
from forge_resilience._shared.launch import LOOPBACK, RUN_NAME, STORE_FD
from forge_resilience._shared.parents import with_parent
from forge_resilience._shared.problems import invalid
from forge_resilience.exit_codes import ExitCode
from forge_resilience.stop import STOP_SIGNALS, install_handlers, restore_handlers

__all__ = ["RUN_NAME", "STORE_FD", "ExitStatus", "local_ranks", "run_local_workers", "run_workers"]

Environ = Mapping[str, str]
Look = Callable[[Mapping[int, int], Mapping[int, int]], str]
"""Called with the pids of the ranks that run and the exit codes of those that ended; a text ends them all."""
_GROUP_SECONDS = 0.5  # by which a signal to a process group may reach a rank before this process
_KILL_SECONDS = 10.0  # from SIGKILL to giving up on a process that hangs in the kernel


@dataclass(frozen=True)
class ExitStatus:
    """How workers ended: the job's exit code, and the cause of a failure ("" without one) with its rank."""

    code: int
    cause: str = ""
    rank: int | None = None
    requested: bool = False
    """Whether a signal asked for the end."""
    left_behind: tuple[int, ...] = ()
    """Ranks that outlive SIGKILL: they hang in the kernel."""


Events = queue.SimpleQueue[tuple[int | None, int]]
"""(rank, exit code as of subprocess) of one that ended, or (None, number of a signal to pass on)."""


def run_local_workers(
    command: Sequence[str],
    nproc: int,
    environ: Environ | None = None,
    *,
    grace_seconds: float = 10.0,
) -> int:
    """Run `command` as `nproc` ranks on this host and return the exit code of the job.

    Each gets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, and
    OMP_NUM_THREADS = cores / nproc unless set; stdout and stderr are inherited, stdin by rank 0. The
    launcher opens the port (a free one) and hands the open socket to rank 0, so no other process can take it
    in between. TERM, USR1, INT and HUP are forwarded, as often as they come (HUP not where it was ignored
    before: `nohup`).

    Exit code: 0 if all end with 0; 75 if all end with 0 or 75 and one with 75, or one dies by a signal
    that was forwarded (it had no handler yet). Else a worker failed:
    the others get TERM, and KILL `grace_seconds` later, one line on stderr names rank, pid and cause,
    and the code is the first that is neither 0, 1, 75 nor a death by a signal (a worker that knows
    the cause may end after a neighbor that only lost its connection), or 1. If the launcher itself is
    killed, the workers get TERM from the kernel (Linux).

    Raises ValueError for nproc below 1, RuntimeError off the main thread, OSError if the command
    cannot be started. Usage: `sys.exit(run_local_workers([sys.executable, "train.py"], 4))`.
    """
    with local_ranks(nproc, os.environ if environ is None else environ) as (environs, store):
        return run_workers(command, environs, store=store, grace_seconds=grace_seconds).code


def words_of(command: Sequence[str]) -> list[str]:
    """Return the words of a command. Raises ValueError for one that is one text."""
    if isinstance(command, str):
        rule, fix = "must be a list of words", "use ['python', 'train.py']"
        raise invalid("command", "type", command, rule, fix)
    return list(command)


def run_workers(
    command: Sequence[str],
    environs: Sequence[Environ],
    *,
    store: socket.socket | None = None,
    grace_seconds: float = 10.0,
    look: Look | None = None,
    look_seconds: float = 0.5,
    parent: int | None = None,
) -> ExitStatus:
    """Run `command` once in each of `environs`, as `run_local_workers` does, and call `look` now and then.

    The first gets stdin and the descriptor of `store`. A text that `look` returns is a cause: all are killed.
    With `parent`, the pid of the process that guards this one, they are stopped when that is gone.
    """
    if threading.current_thread() is not threading.main_thread():
        rule = "must run on the main thread, the only one that gets signals; call it there"
        raise RuntimeError(f"run_local_workers {rule}")
    if not 0 <= grace_seconds <= 10**6:  # not nan either, after which no SIGKILL would come
        rule = "must be from 0 to 10**6 seconds"
        raise invalid("grace_seconds", "range", grace_seconds, rule, "use 10")

    events: Events = queue.SimpleQueue()
    # SimpleQueue.put may be called from a handler; a signal that comes before the workers do waits for them
    before = install_handlers(lambda number, _: events.put((None, number)))
    try:
        workers = _start_workers(words_of(command), environs, store)
        for number, worker in enumerate(workers):
            arguments = (number, worker, events)
            threading.Thread(target=_wait_for_worker, args=arguments, daemon=True).start()

        job = _Job(
            workers=workers,
            ranks=[rank_of(environ, number) for number, environ in enumerate(environs)],
            events=events,
            grace_seconds=grace_seconds,
            look=look,
            look_seconds=look_seconds,
            parent=parent,
        )
        job.run()
    finally:
        restore_handlers(before)
    return job.outcome()  # now that no signal can come unseen


@dataclass(kw_only=True)
class _Job:
    """The running workers, by their numbers on this node (`ranks` has their ranks), and the exit codes of those that ended."""

    workers: list[subprocess.Popen[bytes]]
    ranks: list[int]
    events: Events
    grace_seconds: float
    look: Look | None
    look_seconds: float
    parent: int | None

    def __post_init__(self) -> None:
        self.left = list(range(len(self.workers)))
        # by the number of the worker; a dict, because it keeps the order of their ends
        self.codes: dict[int, int] = {}
        self.failed: int | None = None
        self.hung = ""
        self.forwarded: set[int] = set()
        # the last signal that asked workers to end, because the line about a kill names it
        self.last_signal = signal.SIGTERM.name
        # when those that are left are killed, or given up after that; None sets no limit
        self.next_at: float | None = None
        self.killed = False

    def run(self) -> None:
        """Follow the events until every worker has ended, or cannot be ended."""
        while self.left:
            with contextlib.suppress(queue.Empty):
                number, value = self.events.get(timeout=self._seconds_to_next_action())
                if number is None:
                    self._forward(value)
                else:
                    self._handle_end(number, value)
                continue

            if self.next_at is not None and time.monotonic() >= self.next_at:
                if self.killed:
                    self._print_line_for(self.left, "cannot be killed and is left behind")
                    break
                within = f"within {self.grace_seconds:g} s of {self.last_signal}"
                self._print_line_for(self.left, f"did not end {within}: killed")
                self._kill()
            elif self.look is not None and self.failed is None and not self.killed:
                running = {self.ranks[n]: self.workers[n].pid for n in self.left}
                self.hung = self.look(running, {self.ranks[n]: c for n, c in self.codes.items()})
                if self.hung:
                    self._kill()

    def _seconds_to_next_action(self) -> float | None:
        left = None if self.next_at is None else max(0.0, self.next_at - time.monotonic())
        if self.look is None:
            return left
        return self.look_seconds if left is None else min(left, self.look_seconds)

    def _forward(self, number: int) -> None:
        """Send a signal of the caller to the workers."""
        if self.parent is not None and os.getppid() != self.parent:
            self.next_at = time.monotonic() + self.grace_seconds  # no other process will end them
        self.forwarded.add(number)
        self.last_signal = signal.Signals(number).name
        self._send(number)

    def _kill(self) -> None:
        self._send(signal.SIGKILL)
        self.killed, self.next_at = True, time.monotonic() + _KILL_SECONDS

    def _handle_end(self, number: int, code: int) -> None:
        """Record the end of a worker; the first failure stops the others."""
        self.left.remove(number)
        self.codes[number] = code
        if -code in STOP_SIGNALS and self.failed is None and not self.killed:
            self._await_signal(-code)
        if self._died_forwarded(code) and self.next_at is None:
            # It had no handler yet, so the ranks have not met: those that have one wait for it in vain.
            self.next_at = time.monotonic() + self.grace_seconds
        if code in (0, ExitCode.REQUEUE) or self._died_forwarded(code):
            return
        if self.failed is not None or self.killed:
            return

        self.failed = number
        self.next_at = time.monotonic() + self.grace_seconds
        rest = f"; stopping the other {len(self.left)}" if self.left else ""
        self._print_line_for([number], _describe_end(code) + rest)
        self.last_signal = signal.SIGTERM.name
        self._send(signal.SIGTERM)

    def _await_signal(self, number: int) -> None:
        """Wait for the signal that a rank without a handler died by: sent to the process group, it is a stop."""
        deadline, later = time.monotonic() + _GROUP_SECONDS, []
        while number not in self.forwarded and (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                event = self.events.get(timeout=left)
                if event[0] is None:
                    self._forward(event[1])
                else:
                    later.append(event)
        for event in later:
            self.events.put(event)

    def _died_forwarded(self, code: int) -> bool:
        """Whether it died by a forwarded signal, because it had no handler yet: a requested stop."""
        return code < 0 and -code in self.forwarded

    def _print_line_for(self, numbers: list[int], what: str) -> None:
        for number in numbers:
            line = f"rank {self.ranks[number]} (pid {self.workers[number].pid}) {what}"
            with contextlib.suppress(OSError):  # a terminal that is gone must not end the job
                print(line, file=sys.stderr, flush=True)

    def _send(self, stop: int) -> None:
        for number in self.left:
            with contextlib.suppress(ProcessLookupError):
                self.workers[number].send_signal(stop)

    def outcome(self) -> ExitStatus:
        """Return the exit status of the job, after `run`."""
        while not self.events.empty():  # stop signals after the last end are requests, too
            number, value = self.events.get()
            if number is None:
                self.forwarded.add(value)

        requested, left = bool(self.forwarded), tuple(self.ranks[number] for number in self.left)
        if self.hung:  # a stop was asked for: the job is to come again
            code: int = ExitCode.REQUEUE if requested else ExitCode.ERROR
            return ExitStatus(code, self.hung, None, requested, left)
        if self.failed is None:
            stopped = any(self._died_forwarded(code) for code in self.codes.values())
            code = ExitCode.REQUEUE if stopped else max(self.codes.values(), default=1)
            return ExitStatus(code, requested=requested, left_behind=left)

        code, cause = 1, self.failed
        for number, ended in self.codes.items():
            if ended > 1 and ended != ExitCode.REQUEUE:
                if number != self.failed:
                    self._print_line_for([number], f"{_describe_end(ended)}, which is the job's")
                code, cause = ended, number
                break
        text = _describe_end(self.codes[cause])
        return ExitStatus(code, text, self.ranks[cause], requested, left)


def _describe_end(code: int) -> str:
    """The end of a worker in words, from its exit code."""
    if code > 0:
        return f"ended with code {code}"
    hint = " (out of memory?)" if -code == signal.SIGKILL else ""
    return f"died by {signal.Signals(-code).name}{hint}"


def rank_of(environ: Environ, default: int = 0) -> int:
    """Return the rank of a process by its launcher's variables: RANK, else SLURM_PROCID, else `default`."""
    text = environ.get("RANK") or environ.get("SLURM_PROCID") or ""
    return int(text) if text.isdecimal() else default


def _wait_for_worker(number: int, worker: subprocess.Popen[bytes], events: Events) -> None:
    events.put((number, worker.wait()))


@contextlib.contextmanager
def local_ranks(
    nproc: int, environ: Environ, hand_over_port: bool = True
) -> Iterator[tuple[list[dict[str, str]], socket.socket | None]]:
    """Yield the environments of `nproc` ranks that are all of a job, and the listening socket of MASTER_PORT for rank 0.

    With `hand_over_port` False, for programs that know nothing of STORE_FD, the port is closed again and None comes in
    place of the socket: torch's own start-up opens it, a moment later. Raises ValueError for nproc below 1.
    """
    if nproc < 1:
        raise invalid("nproc", "range", nproc, "must be at least 1", "use the number of ranks here")
    with socket.create_server((LOOPBACK, 0)) as listening:
        # without those of an outer torchrun, because torch in a rank would follow them
        own = {n: value for n, value in environ.items() if not n.startswith("TORCHELASTIC_")}
        own.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // nproc)))
        port, run = str(listening.getsockname()[1]), secrets.token_hex(8)
        environs = rank_environs(own, nproc, nproc, address=LOOPBACK, port=port, run=run)
        if not hand_over_port:
            listening.close()
            for environ in environs:
                del environ[STORE_FD]
            yield environs, None
            return
        environs[0][STORE_FD] = str(listening.fileno())
        yield environs, listening


def _start_workers(
    command: list[str], environs: Sequence[Environ], store: socket.socket | None
) -> list[subprocess.Popen[bytes]]:
    """Start a process per environment; all are killed if one cannot start."""
    workers: list[subprocess.Popen[bytes]] = []
    try:
        for number, environ in enumerate(environs):
            stdin = None if number == 0 else subprocess.DEVNULL
            fds = (store.fileno(),) if store is not None and number == 0 else ()
            die = with_parent(signal.SIGTERM)
            worker = subprocess.Popen(
                command, env=environ, stdin=stdin, pass_fds=fds, preexec_fn=die
            )
            workers.append(worker)
    except BaseException:
        for worker in workers:
            worker.kill()
            worker.wait()

        raise
    finally:
        if store is not None:
            store.close()  # rank 0 has it; a copy here would take connections and never answer
    return workers


def rank_environs(
    environ: Environ, nproc: int, world: int, *, address: str, port: str, run: str, first: int = 0
) -> list[dict[str, str]]:
    """Return the environments of the ranks `first` to `first + nproc - 1` of `world`, which are those of one host."""
    shared = dict(environ) | {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        RUN_NAME: run,
        STORE_FD: "",
    }
    return [shared | {"RANK": str(first + n), "LOCAL_RANK": str(n)} for n in range(nproc)]


def _cores() -> int:
    """Cores that this process may use."""
    # the cores that a Slurm step or a container grants, which can be fewer than all
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


__getattr__ = renamed(__name__)
