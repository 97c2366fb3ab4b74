"""Sinks of rows of metrics. Each runs on a thread of its own: a slow or failing one never delays a step."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from forge_core.registry import Registry
from forge_resilience.journal import read_json_lines
from forge_train.config.files import replace_text
from forge_train.config.schema import MetricsConfig
from forge_train.protocols import Row, Sink


class JsonlSink:
    """One JSON object per line and row. Rows after `resume_step` of an earlier life are removed."""

    def __init__(self, path: Path, resume_step: int) -> None:
        _keep_rows(path, resume_step)
        self.file = path.open("a", encoding="utf-8")

    def write(self, row: Row) -> None:
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


class TensorBoardSink:
    """Scalars of each row in `directory`/tensorboard, under their own names. Needs the extra `forge-train[track]`."""

    def __init__(self, directory: Path, resume_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(directory / "tensorboard"), purge_step=resume_step + 1)

    def write(self, row: Row) -> None:
        for key, value in row.items():
            if key != "step" and isinstance(value, int | float):
                self.writer.add_scalar(key, value, row["step"])
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


SINKS = Registry(
    "metrics.sinks.<name>.name",
    "forge.sinks",
    ("directory", "resume_step"),
    {"tensorboard": TensorBoardSink},
)


def find_sinks(metrics: MetricsConfig) -> dict[str, Callable[[Path, int], Sink]]:
    """The sinks that a configuration names, by their tables' names, with options bound; ValueError with what is
    wrong with names and options, before anything is opened."""
    tables = {name: (sink.name, sink.options) for name, sink in metrics.sinks.items()}
    found = SINKS.bound(tables)
    if metrics.tensorboard and "tensorboard" not in {name for name, _ in tables.values()}:
        found["metrics.tensorboard"] = TensorBoardSink
    return found


class BackgroundSink:
    """Runs a sink on a daemon thread behind a bounded queue.

    A full queue drops the row and counts it; an exception of the sink disables it with one line
    on stderr. `flush` and `close` wait at most `timeout_seconds` for a sink that hangs, once: until it
    answers, nobody waits for it again.
    """

    def __init__(self, open_sink: Callable[[], Sink], name: str, max_rows: int = 1024) -> None:
        self.name = name
        self.dropped = 0
        self._open = open_sink
        self._sink: Sink | None = None  # of the thread; None when off
        self._last_flush: threading.Event | None = None  # set once the sink has answered
        self._queue: queue.Queue[Row | threading.Event | None] = queue.Queue(max_rows)
        self._thread = threading.Thread(target=self._run, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def write(self, row: Row) -> None:
        try:
            self._queue.put_nowait(dict(row))
        except queue.Full:
            self.dropped += 1

    def flush(self, timeout_seconds: float = 5.0) -> bool:
        """Wait until everything written so far is out; False if that took too long."""
        if self._last_flush is not None and not self._last_flush.is_set():
            return False
        done = threading.Event()
        try:
            self._queue.put_nowait(done)
        except queue.Full:
            return False
        self._last_flush = done
        return done.wait(timeout_seconds)

    def close(self, timeout_seconds: float = 5.0) -> None:
        if self.flush(timeout_seconds):
            self._queue.put(None)
            self._thread.join(timeout_seconds)
        if self.dropped:
            _warn(f"{self.name}: {self.dropped} rows dropped because the sink was too slow")

    def _run(self) -> None:
        """The thread: it answers flushes and drains the queue also when the sink is off."""
        with self._off_on_error():
            self._sink = self._open()
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
            elif self._sink is not None:
                with self._off_on_error():
                    self._sink.write(item)
        if self._sink is not None:
            with self._off_on_error():
                self._sink.close()

    @contextlib.contextmanager
    def _off_on_error(self) -> Iterator[None]:
        """Switch the sink off at an exception: an observer must not end a run."""
        try:
            yield
        except Exception as error:
            self._sink = None
            _warn(
                f"{self.name}: {type(error).__name__}: {error}; this sink is off, training goes on"
            )


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file. A line that a kill tore is left out, and one that is JSON but no row
    (an object with a number `step`) with one warning on stderr."""
    rows, foreign = [], 0
    for row in read_json_lines(path):
        if isinstance(row, dict) and type(row.get("step")) in (int, float):
            rows.append(row)
        else:
            foreign += 1
    if foreign:
        _warn(f"{path}: {foreign} lines that are no rows of metrics were left out")
    return rows


def _keep_rows(path: Path, last_step: int) -> None:
    """Drop rows after `last_step`, and lines that are no rows."""
    if not path.exists():
        return
    rows = [json.dumps(row) + "\n" for row in read_rows(path) if row["step"] <= last_step]
    replace_text(path, "".join(rows))


def _warn(message: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # a closed stderr must not stop a run
        os.write(sys.stderr.fileno(), f"forge-train: {message}\n".encode())
