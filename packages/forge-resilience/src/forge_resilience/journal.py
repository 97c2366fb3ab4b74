"""events.jsonl: what happened to a run, one line per event, for people and for later analysis."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from forge_resilience._shared.jsonl import append_line, read_log
from forge_resilience._shared.paths import user_path

__all__ = ["Journal", "read_events", "read_json_lines"]

_MOST_ELEMENTS = 256


class Journal:
    """Append events to a file; a failure is reported once and never stops a run.

        journal = Journal("runs/a/events.jsonl")
        journal.record("save", step=100, seconds=0.4)

    Each line is one JSON object with `event`, `time` (UTC, ISO 8601), `pid`, `host` and the caller's
    fields; one that bears the name of those four is recorded as `event_` and so on. Tensors and arrays
    are recorded as numbers (a tensor of a device waits for it), those over 256 elements as their text;
    nan and inf, which JSON lacks, as null; other values that JSON cannot say as their `str`. A line is written by a single `os.write` to a descriptor
    opened with O_APPEND: lines of several processes do not mix, and a kill tears the last line at
    most. A torn line of an earlier attempt is ended first, so that it cannot swallow a new one. Without a path, as on
    ranks other than 0, nothing is recorded.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self.path = user_path(os.devnull if path is None else path)
        self._off = path is None
        self._host = platform.node()
        self._warned = False

    def record(self, event: str, /, **fields: Any) -> None:
        """Append one event."""
        if self._off:
            return
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        head = {"event": event, "time": now, "pid": os.getpid(), "host": self._host}
        try:
            own = {f"{name}_" if name in head else name: value for name, value in fields.items()}
            append_line(self.path, _plain({**head, **own}))
        except Exception as error:  # also a value that contains itself: no reason to end a run
            self._warn_once(error)

    def _warn_once(self, error: Exception) -> None:
        """Print the first error on stderr."""
        # Not descriptor 2 itself: without a stderr it may be the number of a data file.
        with contextlib.suppress(OSError, ValueError):
            if sys.stderr is not None and not self._warned:
                print(f"{self.path}: events are not recorded: {error}", file=sys.stderr, flush=True)
        self._warned = True


def read_events(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Read the events of a journal, oldest first; torn lines are left out, a missing file has none."""
    return (event for event in read_json_lines(path) if isinstance(event, dict))


def read_json_lines(path: str | os.PathLike[str]) -> Iterator[Any]:
    """Read the values of a JSON-lines file, one per line; lines that a kill tore are left out, a missing file has none."""
    return read_log(user_path(path))


def _plain(value: Any) -> Any:
    """`value` with text for keys, numbers for tensors and null for numbers that JSON lacks."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist") and math.prod(getattr(value, "shape", ())) <= _MOST_ELEMENTS:
        return _plain(value.tolist())
    return value
