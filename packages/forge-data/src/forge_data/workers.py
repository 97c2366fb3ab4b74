"""Worker processes that read rows ahead, and end with the process that trains."""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import os
import queue
import signal
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import RawValue
from typing import Any

import torch

from forge_data import messages
from forge_data._shared.parents import die_with
from forge_data.protocols import Stream
from forge_data.reading import Steps, name_instances, read_rows

# between two looks at a worker that is waited for: its socket may stay open after its end
_TICK_SECONDS = 0.5
_END_SECONDS = 2.0  # that workers have to end by themselves, before they are killed


@dataclass(frozen=True)
class WorkerLoss:
    """A worker that died or hung. `cause` is a signal ("SIGKILL"), "exit code 3" or "no answer for 300 s"."""

    worker: int
    pid: int
    cause: str
    reading: str  # instances and sources, as these may be what ended it

    def __str__(self) -> str:
        ended = "gave" if self.cause.startswith("no answer") else "was ended by"
        return f"data worker {self.worker} (pid {self.pid}) {ended} {self.cause} while reading {self.reading}"


class Workers:
    """`num_workers` processes that read the rows of consecutive steps; worker w reads every `num_workers`-th.

    At most `prefetch` steps are read ahead, over all workers. A worker that dies, or gives nothing for
    `timeout_seconds` while it is waited for, is reported to `lost(loss)`, which raises to end this, and replaced by
    another one that reads the same steps: nothing is lost or repeated, since rows are a function of the step.
    `close` ends the processes. Start it from a thread that lives as long: Linux ends a process with the thread that
    made it.
    """

    def __init__(
        self,
        stream: Stream,
        steps: Steps,
        num_workers: int,
        prefetch: int,
        timeout_seconds: float,
        lost: Callable[[WorkerLoss], None],
    ) -> None:
        self._stream, self._steps = stream, steps
        self._timeout, self._lost = timeout_seconds, lost
        self._workers = [_Worker(stream, steps, i) for i in range(num_workers)]
        # multiprocessing's own exit hook sends one SIGTERM, which a worker ignores (see
        # `_leave_signals_to_parent`), and waits for ever. Hooks run in reverse order: this one is first.
        # It must not refer to `self`, or a loader without users would never be collected.
        self._end = functools.partial(_end, self._workers)
        atexit.register(self._end)
        self._next = 0  # step that is handed out next: in order, whichever worker answers first
        for step in range(prefetch):
            self._worker_of(step).ask(step)
        self._asked = prefetch

    def fetch(self) -> dict[str, Any]:
        """The stream's arrays of the next step; raises the error of a worker that could not read them."""
        answer = self._answer(self._next)
        if isinstance(answer, Exception):
            raise answer
        self._worker_of(self._asked).ask(self._asked)
        self._next, self._asked = self._next + 1, self._asked + 1
        found: dict[str, Any] = answer
        return found

    def close(self) -> None:
        """End and join the processes."""
        atexit.unregister(self._end)
        self._end()

    def _worker_of(self, step: int) -> _Worker:
        return self._workers[step % len(self._workers)]

    def _answer(self, step: int) -> Any:
        """What the worker of a step says, or the one that replaces it."""
        index = step % len(self._workers)
        while True:
            worker = self._workers[index]
            try:
                return worker.answer(self._timeout)
            except _Gone as gone:
                steps = list(worker.asked)
                # one that dies may close its socket before it has a status; one that hangs is not waited for
                cause = str(gone)
                worker.end(time.monotonic() + (0 if cause else _END_SECONDS))
                reading = name_instances(self._stream, self._steps.ids(worker.reading))
                loss = WorkerLoss(index, worker.pid, cause or worker.ended_by(), reading)
                self._lost(loss)
                self._workers[index] = _Worker(self._stream, self._steps, index)
                for again in steps:
                    self._workers[index].ask(again)


def processes() -> Any:
    """The multiprocessing context of workers, pinned: those of a forkserver, which Python 3.14 begins with, are its
    children, and would not see the end of this process. A fork takes milliseconds; a fresh interpreter imports torch, for
    seconds."""
    methods = multiprocessing.get_all_start_methods()
    return multiprocessing.get_context("fork" if "fork" in methods else "spawn")


class _Gone(Exception):
    """A worker died (cause ""), or gives no answer."""


@dataclass
class _Worker:
    """One process, its socket, and the steps that it was asked for and has not answered, in order."""

    stream: Stream
    steps: Steps
    number: int
    asked: deque[int] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self._socket, other = socket.socketpair()
        self._reading = RawValue("q", self.number)
        arguments = os.getpid(), self.stream, self.steps, other, self._reading
        self._process = processes().Process(
            target=_serve, args=arguments, name=f"data worker {self.number}", daemon=True
        )
        self._process.start()
        other.close()  # the worker's alone, so that its end is the end of the stream
        self._socket.settimeout(_TICK_SECONDS)
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def reading(self) -> int:
        """The step that the process read last; later than the first it owes, if answers were on their way."""
        return int(self._reading.value)

    def ask(self, step: int) -> None:
        self.asked.append(step)
        with contextlib.suppress(OSError):  # a dead one is noticed when its answer is waited for
            messages.send(self._socket, messages.parts_of(step))

    def answer(self, timeout_seconds: float) -> Any:
        """The answer to the first step that was asked for. Raises _Gone."""
        begin = time.monotonic()

        def idle() -> None:
            if not self._process.is_alive():  # another process may hold its end of the socket
                raise EOFError
            waited = time.monotonic() - begin
            if timeout_seconds and waited > timeout_seconds:
                raise _Gone(f"no answer for {waited:.0f} s")

        try:
            answer = messages.receive(self._socket, idle)
        except EOFError:
            raise _Gone from None
        self.asked.popleft()
        return answer

    def leave(self) -> None:
        """Tell the process to end once it has read what it reads now."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def end(self, deadline: float) -> None:
        """Join the process, and kill it at `deadline` of the monotonic clock."""
        self.leave()
        self._process.join(max(0.0, deadline - time.monotonic()))
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join(_END_SECONDS)  # one that waits for a disk cannot even be killed

    def ended_by(self) -> str:
        code = self._process.exitcode
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                return signal.Signals(-code).name
        return f"exit code {code}"


def _end(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.leave()
    deadline = time.monotonic() + _END_SECONDS
    for worker in workers:
        worker.end(deadline)


def _serve(parent: int, stream: Stream, steps: Steps, channel: socket.socket, reading: Any) -> None:
    """The life of a worker: read the steps that it is asked for, until the other end is closed.

    A forked worker has copies of its parent's sockets: while it lives, other ranks do not see that the parent has died.
    """
    die_with(parent)
    _leave_signals_to_parent()
    torch.set_num_threads(1)
    # Answers wait here while the training process does not take them: the next step is read meanwhile.
    answers: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
    threading.Thread(target=_send_all, args=(channel, answers), daemon=True).start()
    with contextlib.suppress(EOFError):
        while True:
            reading.value = messages.receive(channel)
            answers.put(_read(stream, steps.ids(reading.value)))


def _read(stream: Stream, ids: Any) -> list[Any]:
    """The parts of an answer: arrays, or the error of the stream."""
    try:
        return messages.parts_of(dict(read_rows(stream, ids)))
    except Exception as error:
        # what was raised is lost on the way, so that its text goes along, for who looks at the traceback
        error.add_note(f"in a data worker:\n{traceback.format_exc()}")
        return messages.parts_of(error)


def _send_all(channel: socket.socket, answers: queue.SimpleQueue[list[Any]]) -> None:
    with contextlib.suppress(
        OSError
    ):  # the other end is closed, so that no caller waits for answers
        while True:
            messages.send(channel, answers.get())


def _leave_signals_to_parent() -> None:
    """Ignore signals that ask the job to stop: the parent decides, and needs a batch or two before its save.

    A terminal sends SIGINT (SIGHUP when it closes), and a scheduler SIGTERM, to every process of the
    job. A second SIGTERM ends the worker, so that a hanging one cannot outlive the parent's exit.
    """
    for name in ("SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, _: signal.signal(number, signal.SIG_DFL))
