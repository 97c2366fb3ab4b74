"""What a run says about itself: rows of metrics and events. Rank 0 writes, the others keep quiet."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from forge_resilience import Journal
from forge_train.config.schema import MetricsConfig
from forge_train.metrics.console import ConsoleSink, console_mode
from forge_train.metrics.sinks import BackgroundSink, JsonlSink, Sink, find_sinks
from forge_train.trainer.host_copy import HostCopy
from forge_train.trainer.run_directory import RunDirectory


@dataclass
class PendingRow:
    """A logged step whose device values are on their way."""

    row: dict[str, Any]
    values: HostCopy
    """Loss, gradient norm, steps skipped since the row before, longest run of them."""
    more: Sequence[Callable[[], dict[str, float]]] = ()
    """Further columns, which were copied with the values above."""


class Recorder:
    """Sinks and journal of a run, and the row that waits for its values.

    A row's values are copied to the host when it is made and looked at one step later: nobody waits for the
    step that was queued in between. `record` writes an event. On ranks other than 0 nothing is written.
    """

    def __init__(
        self,
        paths: RunDirectory,
        metrics: MetricsConfig,
        step: int,
        total_steps: int,
        writes: bool,
    ) -> None:
        self.pending: PendingRow | None = None
        self.sinks: list[BackgroundSink] = []
        self.journal = Journal(paths.events) if writes else None
        if not writes:
            return
        self._open("metrics.jsonl", lambda: JsonlSink(paths.metrics, step))
        mode = console_mode(metrics.console)
        if mode is not None:
            self._open("console", lambda: ConsoleSink(mode, step, total_steps))
        for name, make in find_sinks(metrics).items():
            self._open(name, partial(make, paths.path, step))

    def _open(self, name: str, make: Callable[[], Sink]) -> None:
        self.sinks.append(BackgroundSink(make, name))

    def record(self, event: str, **fields: Any) -> None:
        if self.journal is not None:
            self.journal.record(event, **fields)

    def take(self) -> dict[str, Any] | None:
        """The pending row with its values, sent to the sinks; None when nothing waits."""
        if self.pending is None:
            return None
        pending, self.pending = self.pending, None
        row = pending.row
        row["loss"], row["grad_norm"] = map(_finite, pending.values.read()[:2])
        for columns in pending.more:
            row.update({name: _finite(value) for name, value in columns().items()})
        for sink in self.sinks:
            sink.write(row)
        return row

    def flush(self) -> None:
        for sink in self.sinks:
            sink.flush()

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()


def _finite(number: float) -> float | None:
    """None for nan and inf, which JSON cannot say."""
    return number if math.isfinite(number) else None
