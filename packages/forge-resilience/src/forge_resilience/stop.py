"""Stop signals: a flag that the training loop reads between steps, and handlers for the time before and after the loop."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from forge_resilience.exit_codes import ExitCode

__all__ = ["STOP_SIGNALS", "StopSignal", "interruptible", "leave_on_signal", "leave_with_parent"]

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


def install_handlers(
    handler: Callable[[int, FrameType | None], None],
    signals: Sequence[signal.Signals] = STOP_SIGNALS,
) -> dict[signal.Signals, Any]:
    """Handle `signals`, SIGHUP only if it is not ignored: under nohup a process outlives its terminal.

    Returns the handlers that were there, for `restore_handlers`; raises as `signal.signal`, and then changes none.
    """
    before: dict[signal.Signals, Any] = {}
    try:
        for number in signals:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, handler)
    except BaseException:  # a signal that cannot be caught must leave all handlers as they were
        restore_handlers(before)
        raise
    return before


def restore_handlers(before: dict[signal.Signals, Any]) -> None:
    """Put back the handlers that `install_handlers` replaced."""
    while before:
        number, handler = before.popitem()
        # None: the handler before ours was not installed from Python and cannot be put back
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


class StopSignal:
    """Turn stop signals into a flag while the context is open.

        with StopSignal() as stop:
            while not stop.requested:
                train_one_step()

    The handler sets the flag and writes one line to file descriptor 2 with `os.write`; it takes no
    lock, allocates no logger and survives a stderr that is closed, broken, full without a reader, or
    by now a data file, so that a stop never depends on logging. Signals after the first are
    counted and change nothing: a save under way is not disturbed by impatience (SIGKILL remains).
    Leaving the context restores the handlers that were there. SIGHUP, which comes when the terminal
    goes, is a request too, unless it is ignored when the context opens: under `nohup` the run goes on.

    Only this process knows of the signal; ranks agree by their votes (`Agreement`), and all but one
    may set `announce=False`. A forked child (a data worker)
    inherits the handler: it outlives a signal to the whole process group, as it must while its parent
    finishes the step, and prints nothing.

    Raises RuntimeError when entered off the main thread, where Python cannot install handlers, and
    when entered while open.
    """

    def __init__(
        self, signals: Sequence[signal.Signals] = STOP_SIGNALS, announce: bool = True
    ) -> None:
        self.signals = tuple(signals)
        self.announce = announce
        self.count = 0
        self._first: int | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._process = 0
        self._stderr: tuple[int, int] | None = None

    @property
    def requested(self) -> bool:
        """True from the first signal on."""
        return self._first is not None

    @property
    def number(self) -> int:
        """Number of the first signal, 0 before any; a rank votes with it."""
        return self._first or 0

    @property
    def signal_name(self) -> str | None:
        """Name of the first signal, such as `SIGTERM`; None before any."""
        return None if self._first is None else self.name_of(self._first)

    @staticmethod
    def name_of(number: int) -> str:
        """Name of a signal by its number, of this machine's signals."""
        return signal.Signals(number).name

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                f"StopSignal was entered on thread {threading.current_thread().name!r}, but signal "
                "handlers can only be installed on the main thread; enter it there"
            )
        if self._before:
            raise RuntimeError("StopSignal was entered while it is open; use one object a context")

        self._process, self._stderr = os.getpid(), _stderr_file()
        self._before = install_handlers(self._handle, self.signals)
        return self

    def __exit__(self, *exc: object) -> None:
        restore_handlers(self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self._first is not None:
            return
        self._first = number
        if self.announce and os.getpid() == self._process:
            line = f"{self.name_of(number)}: saving after this step, then leaving\n"
            self._write_to_stderr(line.encode())

    def _write_to_stderr(self, line: bytes) -> None:
        """Write to descriptor 2, if it is still the stderr of the start and has room."""
        with contextlib.suppress(OSError):  # the reader of stderr may be gone
            # A closed descriptor 2 is given to the next file that is opened, which may be a checkpoint.
            if self._stderr is None or _stderr_file() != self._stderr:
                return
            poll = select.poll()
            poll.register(2, select.POLLOUT)
            if poll.poll(0):  # a full pipe without a reader would block the stop for ever
                os.write(2, line)


def _stderr_file() -> tuple[int, int] | None:
    """(device, inode) of descriptor 2; None when it is closed or was when Python started."""
    if sys.__stderr__ is not None:
        with contextlib.suppress(OSError):
            status = os.fstat(2)
            return status.st_dev, status.st_ino
    return None


def leave_on_signal(code: int, *more: signal.Signals) -> None:
    """End this process with `code` on SIGTERM, SIGUSR1 and `more`, at once: nothing is flushed."""
    signals = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, *more)
    install_handlers(lambda *_: os._exit(code), signals)


@contextlib.contextmanager
def interruptible(code: int) -> Iterator[None]:
    """One Ctrl-C ends the block and nothing else; from then on, and after the block, it ends this process with `code`.

    A handler that is replaced instead could raise until the other one is there, outside of the block.
    """
    within = True

    def handle(*_: object) -> None:
        nonlocal within
        if not within:
            os._exit(code)
        within = False
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, handle)
    try:
        try:
            yield
        finally:
            within = False
    except KeyboardInterrupt:
        pass


def leave_with_parent(stop: StopSignal, parent: int) -> Callable[[], None]:
    """Leave at once if a stop is requested and `parent` is gone, until the returned function is called.

    For ranks that wait until all have met: those that had no handler yet died with their launcher and never come.
    Nothing is lost, so the exit code is REQUEUE. `stop` must be open.
    """
    before = {number: signal.getsignal(number) for number in stop.signals}
    handlers = {number: handler for number, handler in before.items() if callable(handler)}

    def handle(number: int, frame: FrameType | None) -> None:
        handlers[signal.Signals(number)](number, frame)
        leave_without_parent()

    def leave_without_parent() -> None:
        if stop.requested and os.getppid() != parent:
            os._exit(ExitCode.REQUEUE)

    def restore() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    for number in handlers:
        signal.signal(number, handle)
    leave_without_parent()
    return restore
