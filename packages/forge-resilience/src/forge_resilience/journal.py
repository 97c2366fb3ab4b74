"""events.jsonl: what happened to a run, one line per event, for people and for later analysis."""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


class Journal:
    """Appends events to a file; a full or missing disk is reported once and never stops a run.

        journal = Journal("runs/a/events.jsonl")
        journal.record("save", step=100, seconds=0.4)

    Each line is one JSON object with `event`, `time` (UTC, ISO 8601), `pid`, `host` and the caller's
    fields, written by a single `os.write` to a descriptor opened with O_APPEND: lines of several
    processes do not mix, and a kill tears the last line at most. A torn line of an earlier life is
    ended first, so that it cannot swallow a new one.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._host = platform.node()
        self._warned = False

    def record(self, event: str, **fields: Any) -> None:
        """Append one event. Fields must be JSON; anything else is written as its `str`."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = {"event": event, "time": now, "pid": os.getpid(), "host": self._host, **fields}
        try:
            self._append((json.dumps(line, default=str) + "\n").encode())
        except OSError as error:
            self._warn_once(error)

    def _append(self, data: bytes) -> None:
        descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                data = b"\n" + data
            os.write(descriptor, data)
        finally:
            os.close(descriptor)

    def _warn_once(self, error: OSError) -> None:
        if self._warned:
            return
        self._warned = True
        with contextlib.suppress(OSError):  # nobody may read stderr any more
            os.write(2, f"{self.path}: events are not recorded: {error.strerror}\n".encode())


def read_events(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The events of a journal, oldest first; torn lines are left out, a missing file has none."""
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    for line in text.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            yield event
