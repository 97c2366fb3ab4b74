"""A stop that was asked for by a signal, as a flag that the loop reads between steps."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopSignal:
    """Turns signals into a flag while the context is open.

        with StopSignal() as stop:
            while not stop.requested:
                train_one_step()

    The handler sets the flag and writes one line to file descriptor 2 with `os.write`; it takes no
    lock, allocates no logger and survives a closed or broken stderr, so that a stop never depends on
    logging. Signals after the first are counted and change nothing: a save under way is not disturbed
    by impatience (SIGKILL remains). Leaving the context restores the handlers that were there.

    Only this process knows of the signal; ranks agree elsewhere. Raises RuntimeError when entered off
    the main thread, where Python cannot install handlers.
    """

    def __init__(self, signals: Sequence[signal.Signals] = STOP_SIGNALS) -> None:
        self.signals = tuple(signals)
        self.count = 0
        self._first: int | None = None
        self._before: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        """True from the first signal on."""
        return self._first is not None

    @property
    def signal_name(self) -> str | None:
        """Name of the first signal, such as `SIGTERM`; None before any."""
        return None if self._first is None else signal.Signals(self._first).name

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                f"StopSignal was entered on thread {threading.current_thread().name!r}, but signal "
                "handlers can only be installed on the main thread; enter it there"
            )
        self._before = {s: signal.signal(s, self._handle) for s in self.signals}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            # None: the handler before ours was not installed from Python and cannot be put back
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self._first is not None:
            return
        self._first = number
        name = signal.Signals(number).name
        with contextlib.suppress(OSError):  # nobody may read stderr any more
            os.write(2, f"{name}: saving after this step, then leaving\n".encode())
