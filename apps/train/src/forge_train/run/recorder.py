"""Files and sinks of a run: rows of metrics and events. Only rank 0 writes."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from forge_ckpt import SaveEvent
from forge_resilience import Journal
from forge_resilience.alerts import FOLLOWED, Alerts, AlertsConfig
from forge_resilience.background_sink import BackgroundSink, Open, end_all
from forge_resilience.sinks import JsonlSink
from forge_train.build.run_directory import RunDirectory
from forge_train.config.schema import MetricsConfig
from forge_train.metrics.console import ConsoleSink, console_mode
from forge_train.metrics.sinks import find_sinks

JSONL = "metrics.jsonl"
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
    """Sinks and journal of a run. On ranks other than 0 (`writes` False) nothing is written."""

    def __init__(
        self,
        paths: RunDirectory,
        metrics: MetricsConfig,
        step: int,
        total_steps: int,
        writes: bool,
    ) -> None:
        self.journal = Journal(paths.events) if writes else None
        self._paths, self._metrics, self._total_steps = paths, metrics, total_steps
        found = self._openers(step) if writes else {}
        # metrics.jsonl first: the end waits for it first
        self.sinks = {name: BackgroundSink(make, name) for name, make in found.items()}

    def reopen(self, step: int, total_steps: int) -> None:
        """End the sinks and open them to go on behind `step`: they drop rows of later steps, as at a resume."""
        self._total_steps = total_steps
        if self.journal is not None:
            for name, make in self._openers(step).items():
                self.sinks[name].reopen(make)

    def _openers(self, step: int) -> dict[str, Open]:
        paths, mode = self._paths, console_mode(self._metrics.console)
        found: dict[str, Open] = {JSONL: lambda: JsonlSink(paths.metrics, step)}
        if mode is not None:
            found["console"] = lambda: ConsoleSink(mode, step, self._total_steps)
        for name, make in find_sinks(self._metrics).items():
            found[f"metrics.sinks.{name}"] = partial(make, paths.path, step)
        return found

    def record(self, event: str, **fields: Any) -> None:
        """Append an event to the journal."""
        if self.journal is not None:
            self.journal.record(event, **fields)

    def record_save(self, event: SaveEvent, limit: float) -> None:
        """Append what became of a save, and that it took longer than `limit` seconds."""
        fields: dict[str, Any] = {"step": event.step, "seconds": round(event.seconds, 4)}
        if event.kind == "committed":
            fields |= self._over_limit(event, limit)
        if event.error:
            fields |= {"error": event.error, "failures": event.failures}
        self.record(_SAVE_EVENTS[event.kind], **fields)

    def _over_limit(self, event: SaveEvent, limit: float) -> dict[str, float]:
        """{"limit": seconds} of a save that took longer than a batch job leaves it at its end, and a line that says so."""
        if self.journal is None or event.seconds <= limit:
            return {}
        # in the thread that writes: nobody may read stderr any more
        with contextlib.suppress(OSError):
            print(
                f"forge-train: the save of step {event.step} took {event.seconds:.3g} s, longer than "
                f"resilience.save_limit_seconds {limit:g}: a batch job may be killed before its last save ends; "
                "raise it",
                file=sys.stderr,
            )
        return {"limit": limit}

    def write(self, row: Mapping[str, Any]) -> None:
        """Send a row of metrics to all sinks; waits for none."""
        for sink in self.sinks.values():
            sink.write(row)

    def flush(self) -> None:
        """Wait until metrics.jsonl has all rows on the disk; not for other sinks, nor again for a disk that hangs."""
        if JSONL in self.sinks:
            self.sinks[JSONL].flush()

    def close(self) -> None:
        """End the sinks; waits for those that hang once, briefly, and for all of them together."""
        end_all(list(self.sinks.values()), END_SECONDS)


def alerts(
    paths: RunDirectory, config: AlertsConfig, rank: int = 0
) -> contextlib.AbstractContextManager[object]:
    """Follow the journal while open, as [resilience.alerts] says: on rank 0, unless the process that started the ranks does."""
    if rank or FOLLOWED in os.environ:
        return contextlib.nullcontext()
    return Alerts(paths.events, config)
