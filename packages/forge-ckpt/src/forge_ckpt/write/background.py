"""Saves that a thread of its own writes and commits, one at a time, while training goes on."""

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger("forge_ckpt")
# A process that ends waits so long for its last save: another rank may hang for ever.
END_SECONDS = 600.0
_NICE = 10  # of the writing threads, so that training gets the processors first


@dataclass(frozen=True)
class SaveEvent:
    """What became of a save.

    kind: "staged" (its bytes are copied, the state may change), "written" (this rank's file is on disk; on rank 0
    all files are), "committed" (durable on all ranks, and what retention drops is gone) or "failed" (on all ranks).
    seconds: since the save began. error: the message of a failure. failures: of how many in a row it is the last.
    """

    kind: str
    step: int
    seconds: float
    error: str = ""
    failures: int = 0


class SaveHandle(Future[Path]):
    """Handle of a save that `Store.save` returns: a `concurrent.futures.Future`.

        handle = store.save(step, state, wait=False)
        handle.done()      # whether the save is committed or failed; returns at once
        handle.result()    # waits: the directory of the checkpoint, or raises what the save failed with

    step: the step that is saved. ``result(timeout)`` and ``exception(timeout)`` raise TimeoutError after ``timeout``
    seconds. Callbacks run in the writing thread, and must not call the store. Both may be called on some ranks only, at any time: nothing is communicated, and the calls of the store
    raise as they would without them (but ``close``, which raises what no caller knows). A save cannot be canceled.
    """

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step
        # True once a caller knows how the save ended, so that ``close`` does not report its failure again.
        self.was_read = False
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> Path:
        """Wait, and return the directory of the committed checkpoint; raise the error of a failed save."""
        self.exception(timeout)
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, and return the error of a failed save, or None."""
        error = super().exception(timeout)
        self.was_read = True
        return error


class SaveEvents:
    """Events of the saves of a store: handed to ``on_event``, then kept until ``take``.

    Called from the training thread and from the writing thread.
    """

    def __init__(self, on_event: Callable[[SaveEvent], None] | None) -> None:
        self._on_event = on_event
        self._lock = threading.Lock()
        self._news: list[SaveEvent] = []

    def emit(
        self, kind: str, step: int, started: float, error: str = "", failures: int = 0
    ) -> None:
        """Report a save that began at ``started`` of ``time.perf_counter``. An exception of ``on_event`` is logged: it must not undo a save."""
        event = SaveEvent(kind, step, time.perf_counter() - started, error, failures)
        try:
            if self._on_event is not None:
                self._on_event(event)
        except Exception:
            logger.exception("on_event of %s at step %d", kind, step)
        with self._lock:
            self._news.append(event)

    def take(self) -> list[SaveEvent]:
        """All events since the last call, oldest first."""
        with self._lock:
            news, self._news = self._news, []
        return news


class BackgroundWriter:
    """At most one call at a time, in a thread of low priority.

    The end of the process waits for it, at most ``END_SECONDS``: the thread is a daemon, and a rank that hangs
    keeps no other alive.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        # Kept until `wait` has returned how the call ended, so that no failure is lost.
        self.last: Future[Path] | None = None
        # Before concurrent.futures refuses new work, which the saving thread still has. Private: atexit is later.
        register = getattr(threading, "_register_atexit", atexit.register)
        register(_wait_at_exit, weakref.ref(self))

    def start(self, run: Callable[[], Path], future: Future[Path]) -> None:
        """Call ``run`` in the thread, for the result of ``future``; the call before must have been waited for."""
        assert self._thread is None, "wait() first"

        def call() -> None:
            if sys.platform == "linux":  # elsewhere it would be the whole process
                with contextlib.suppress(OSError):  # a sandbox may refuse it
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
            try:
                path = run()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(path)

        thread = threading.Thread(target=call, name="forge-ckpt-save", daemon=True)
        thread.start()
        self._thread, self.last = thread, future

    def fail(self, future: Future[Path], error: BaseException) -> None:
        """Let ``future`` and the next ``wait`` have ``error``: a call failed before it could start."""
        future.set_exception(error)
        self.last = future

    def wait(self, seconds: float | None = None) -> BaseException | None:
        """Wait for the last call; its exception, once, or None. An interrupt leaves it to the next ``wait``.

        Raises TimeoutError if it still runs after ``seconds``.
        """
        last, thread = self.last, self._thread
        # The thread lives in the process that started it: a forked data worker ends without it.
        if last is None or (thread is not None and not thread.is_alive() and not last.done()):
            return None
        try:
            # Not of SaveHandle, whose method notes that a caller knows the error.
            error = Future.exception(last, seconds)
        except TimeoutError:
            raise TimeoutError(f"the save still runs after {seconds} seconds") from None
        if thread is not None:
            # join alone, interrupted, would take the thread for ended (Python 3.11)
            thread.join()  # it still frees tensors; the end of the process meanwhile would be an abort
        self._thread = self.last = None
        return error


def _wait_at_exit(writer: "weakref.ref[BackgroundWriter]") -> None:
    """Wait for the last save of a writer that still exists."""
    found = writer()
    if found is not None:
        with contextlib.suppress(TimeoutError):
            found.wait(END_SECONDS)
