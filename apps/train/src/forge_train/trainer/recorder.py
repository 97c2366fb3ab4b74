"""What a run says about itself: rows of metrics and events. Rank 0 writes, the others keep quiet."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from forge_resilience import Journal
from forge_train.config.schema import MetricsConfig
from forge_train.metrics.console import ConsoleSink, console_mode
from forge_train.metrics.sinks import BackgroundSink, JsonlSink, TensorBoardSink
from forge_train.trainer.run_directory import RunDirectory


@dataclass
class PendingRow:
    """A logged step whose device values have not been read yet."""

    row: dict[str, Any]
    loss: torch.Tensor
    grad_norm: torch.Tensor
    more: Callable[[], dict[str, float]] = dict
    """Further columns, read from the device with the values above."""


class Recorder:
    """Sinks and journal of a run, and the row that waits for its values.

    A row is read one step after its own, when the device has long finished it: the only host read of
    the loop. `record` writes an event. On ranks other than 0 nothing is written.
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
        if metrics.tensorboard:
            self._open("tensorboard", lambda: TensorBoardSink(paths.tensorboard, step))

    def _open(self, name: str, make: Callable[[], Any]) -> None:
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
        row["loss"], row["grad_norm"] = _finite(pending.loss), _finite(pending.grad_norm)
        row.update(pending.more())
        for sink in self.sinks:
            sink.write(row)
        return row

    def flush(self) -> None:
        for sink in self.sinks:
            sink.flush()

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()


def _finite(value: torch.Tensor) -> float | None:
    """None for nan and inf, which JSON cannot say."""
    number = float(value)
    return number if math.isfinite(number) else None
