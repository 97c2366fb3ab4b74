"""Sinks and journal of a run: rows of metrics and events. One process writes; a slow or failing sink costs rows, never steps."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Any, NamedTuple

from forge_resilience.journal import Journal

__all__ = ["END_SECONDS", "BackgroundSink", "Recorder", "Row", "end_all"]

Row = Mapping[str, Any]
#: Makes a sink: an object with `write(row)`, and optionally `flush()` and `close()`. A function, because the thread of
#: the sink makes it.
Open = Callable[[], Any]

# "save" is a checkpoint that a resume can use, so only a commit makes it.
_SAVE_EVENTS = {
    "staged": "save_staged", "written": "save_written", "failed": "save_failed", "committed": "save",
}  # fmt: skip
#: Seconds that the end of a run waits for all sinks together: a service may need some to take the last rows.
END_SECONDS = 10.0


class _Reopen(NamedTuple):
    """Order to the thread: end the sink and open another in its place."""

    open: Open


class BackgroundSink:
    """Run a sink on a daemon thread that takes rows from a queue of `max_rows`; only `flush` and `join` wait.

        sink = BackgroundSink(lambda: MyTracker(url), "tracker")
        sink.write({"step": 1, "loss": 2.5})
        end_all([sink], timeout_seconds=10)

    A full queue drops the row and counts it; an exception of the sink disables it with one line on stderr. `flush`
    waits at most `timeout_seconds` for a sink that hangs, once: until it answers, no later call waits for it.
    """

    def __init__(self, open_sink: Open, name: str, max_rows: int = 1024) -> None:
        self.name = name
        self.dropped = 0
        self._max_rows = max_rows
        # used only by the thread, so it needs no lock; None when off
        self._sink: Any = None
        # set once the sink has answered; until then no other flush waits for it
        self._last_flush: threading.Event | None = None
        # without a bound of its own: orders must reach the thread after rows that fill it
        self._queue: queue.SimpleQueue[Row | threading.Event | _Reopen | None] = queue.SimpleQueue()
        self._queue.put(_Reopen(open_sink))
        self._thread = threading.Thread(target=self._run, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def write(self, row: Row) -> None:
        """Put a row into the queue; a full queue drops it."""
        if self._queue.qsize() < self._max_rows:
            self._queue.put(dict(row))
        else:
            self.dropped += 1

    def reopen(self, open_sink: Open) -> None:
        """End the sink after the rows so far, and open another for those that follow."""
        self._queue.put(_Reopen(open_sink))

    def flush(self, timeout_seconds: float = 5.0) -> bool:
        """Wait until everything written so far is out; False if that took too long."""
        if self._last_flush is not None and not self._last_flush.is_set():
            return False
        self._last_flush = done = threading.Event()
        self._queue.put(done)
        return done.wait(timeout_seconds)

    def end(self) -> None:
        """Let the thread end the sink after the rows so far."""
        self._queue.put(None)

    def join(self, timeout_seconds: float) -> None:
        """Wait for the thread after `end`, and report which rows are lost."""
        self._thread.join(timeout_seconds)
        if self.dropped:
            self._warn(f"{self.dropped} rows dropped because the sink was too slow")
        if self._thread.is_alive():
            self._warn("has not taken its last rows in time; the process ends without it")

    def _run(self) -> None:
        """The thread: it answers flushes and drains the queue also when the sink is off."""
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                self._call_if_present("flush")
                item.set()
            elif isinstance(item, _Reopen):
                self._call_if_present("close")
                self._sink = None
                with self._off_on_error():
                    self._sink = item.open()
            elif self._sink is not None:
                with self._off_on_error():
                    self._sink.write(item)
        self._call_if_present("close")

    def _call_if_present(self, method: str) -> None:
        """Call a method of the sink, if it is on and has it."""
        function = getattr(self._sink, method, None)
        if function is not None:
            with self._off_on_error():
                function()

    @contextlib.contextmanager
    def _off_on_error(self) -> Iterator[None]:
        """Switch the sink off at an exception: an observer must not end a run."""
        try:
            yield
        except BaseException as error:  # also sys.exit, which would end the thread without a word
            self._sink = None
            self._warn(f"{type(error).__name__}: {error}; this sink is off, training goes on")

    def _warn(self, message: str) -> None:
        with contextlib.suppress(OSError):  # a closed stderr must not stop a run
            os.write(2, f"{self.name}: {message}\n".encode())


def end_all(sinks: Sequence[BackgroundSink], timeout_seconds: float) -> None:
    """End sinks, and wait `timeout_seconds` for all of them together, those that come first first."""
    for sink in sinks:
        sink.end()
    until = monotonic() + timeout_seconds
    for sink in sinks:
        sink.join(max(0.0, until - monotonic()))


class Recorder:
    """Sinks and journal of a run.

        recorder = Recorder("runs/a/events.jsonl", {"metrics": partial(JsonlSink, path)}, step=100)
        recorder.record("start")
        recorder.write({"step": 101, "loss": 2.5})

    journal: None for a process that writes nothing. sinks: from the step that is loaded to a sink, by name; `flush` waits for
    the first one, and so does the end.
    """

    def __init__(
        self,
        journal: str | os.PathLike[str] | None,
        sinks: Mapping[str, Callable[[int], Any]],
        step: int,
    ) -> None:
        self.journal = None if journal is None else Journal(journal)
        self._make = dict(sinks)
        self.sinks = {n: BackgroundSink(partial(make, step), n) for n, make in sinks.items()}

    def reopen(self, step: int) -> None:
        """End the sinks and open them to go on after `step`: they drop rows of later steps, as at a resume."""
        for name, make in self._make.items():
            self.sinks[name].reopen(partial(make, step))

    def record(self, event: str, **fields: Any) -> None:
        """Append an event to the journal."""
        if self.journal is not None:
            self.journal.record(event, **fields)

    def record_save(self, event: Any, limit: float) -> None:
        """Append the event of a save; one that took longer than `limit` seconds also prints a warning.

        `event` is a `forge_ckpt.SaveEvent`. Called from the thread that writes, too.
        """
        fields: dict[str, Any] = {"step": event.step, "seconds": round(event.seconds, 4)}
        if event.kind == "committed" and event.seconds > limit:
            fields["limit"] = limit
            rule = f"longer than resilience.save_limit_seconds {limit:g}"
            text = f"the save of step {event.step} took {event.seconds:.3g} s, {rule}"
            fix = "a batch job may be killed before its last save ends; raise it"
            # the reader of stderr may be gone
            with contextlib.suppress(OSError):
                if self.journal is not None:
                    print(f"forge-train: {text}: {fix}", file=sys.stderr)
        if event.error:
            fields |= {"error": event.error, "failures": event.failures}
        self.record(_SAVE_EVENTS[event.kind], **fields)

    def write(self, row: Mapping[str, Any]) -> None:
        """Send a row of metrics to all sinks; waits for none."""
        for sink in self.sinks.values():
            sink.write(row)

    def flush(self) -> None:
        """Wait until the first sink has all rows on the disk; not for the others, nor again for a disk that hangs."""
        for sink in [*self.sinks.values()][:1]:
            sink.flush()

    def close(self) -> None:
        """End the sinks; waits for those that hang once, briefly, and for all of them together."""
        end_all(list(self.sinks.values()), END_SECONDS)
