"""A thread that reads a bounded number of steps ahead, in order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any


class ReadAhead:
    """`read(0), read(1), ...` in order, at most `depth` of them before they are taken.

    One thread calls `read`, which helps while it waits for a disk or hashes: both release the lock of the interpreter.
    An error is raised by the `fetch` of its step, and ends the thread. `read` must not refer to the object that owns this one:
    it would never be collected.
    Usage: `ahead = ReadAhead(lambda step: stream.arrays(ids[step]), depth=2); arrays = ahead.fetch()`.
    """

    def __init__(self, read: Callable[[int], Any], depth: int) -> None:
        self._found: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._room = threading.Semaphore(depth)
        self._ended = threading.Event()
        arguments = read, self._found, self._room, self._ended
        threading.Thread(target=_run, args=arguments, name="data", daemon=True).start()

    def fetch(self) -> Any:
        """What `read` returned for the next step; waits for it."""
        found, error = self._found.get()
        if error is not None:
            raise error
        self._room.release()
        return found

    def close(self) -> None:
        """End the thread after the step that it reads now; not waited for, as a read may hang."""
        self._ended.set()
        self._room.release()


def _run(
    read: Callable[[int], Any],
    found: queue.SimpleQueue[Any],
    room: threading.Semaphore,
    ended: threading.Event,
) -> None:
    step = 0
    while room.acquire() and not ended.is_set():
        try:
            found.put((read(step), None))
        except BaseException as error:
            found.put((None, error))
            return
        step += 1
