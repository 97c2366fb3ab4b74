"""Files and sinks of a run: rows of metrics and events. One process writes."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from forge_resilience.background_sink import BackgroundSink, end_all
from forge_resilience.journal import Journal

__all__ = ["END_SECONDS", "Recorder"]

# "save" is a checkpoint that a resume can use.
_SAVE_EVENTS = {
    "staged": "save_staged",
    "written": "save_written",
    "committed": "save",
    "failed": "save_failed",
}
#: Seconds that the end of a run waits for all sinks together: a service may need some to take the last rows.
END_SECONDS = 10.0


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
        """Append what became of a save, and that it took longer than `limit` seconds, after which a line says so.

        `event` is a `forge_ckpt.SaveEvent`. Called from the thread that writes, too.
        """
        fields: dict[str, Any] = {"step": event.step, "seconds": round(event.seconds, 4)}
        if event.kind == "committed" and event.seconds > limit:
            fields["limit"] = limit
            self._warn_of_limit(event, limit)
        if event.error:
            fields |= {"error": event.error, "failures": event.failures}
        self.record(_SAVE_EVENTS[event.kind], **fields)

    def _warn_of_limit(self, event: Any, limit: float) -> None:
        text = (
            f"forge-train: the save of step {event.step} took {event.seconds:.3g} s, longer than "
            f"resilience.save_limit_seconds {limit:g}: a batch job may be killed before its last save ends; raise it"
        )
        # the reader of stderr may be gone
        with contextlib.suppress(OSError):
            if self.journal is not None:
                print(text, file=sys.stderr)

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
