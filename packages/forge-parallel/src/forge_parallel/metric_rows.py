"""Rows of metrics of a training loop, and the time of its steps. A row is begun after a step and finished one step later, when
its numbers are on the host."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from forge_parallel.compile import recompilations
from forge_parallel.host_copy import HostCopy

__all__ = ["Columns", "Counters", "Meter", "MetricRows", "Timer", "finite"]

#: From numbers of a row to columns.
Columns = Callable[[list[float]], Mapping[str, Any]]
#: Columns that are None in a row without a step.
_OF_A_STEP = (
    *("loss", "val_loss", "grad_norm", "lr", "tokens_per_second", "mfu", "data_wait_seconds"),
    *("memory_bytes", "seconds_left", "instances"),
)


class Counters(Protocol):
    """How far a run is, such as `forge_resilience.progress.Progress`."""

    step: int
    tokens: int
    seconds: float
    device_seconds: float

    def count(self, seconds: float) -> None:
        """Add seconds of training."""


@dataclass
class Timer:
    """How long something took, once it is over."""

    seconds: float = 0.0


class Meter:
    """Counts tokens and seconds of training steps; `pause` does not count, `wait` does.

    One object per window between two rows. No device synchronization: on an accelerator the host is
    at most the step ahead of it that is queued before a row's values are read, at either end of a window.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.steps = 0
        self.of = {"wait": 0.0, "pause": 0.0}  # seconds
        self.started = time.perf_counter()

    def count(self, tokens: int) -> None:
        """A step was done."""
        self.tokens += tokens
        self.steps += 1

    @contextmanager
    def timed(self, kind: str) -> Iterator[Timer]:
        """The code inside is a `wait` for data, or a `pause` of training."""
        timer, start = Timer(), time.perf_counter()
        try:
            yield timer
        finally:
            timer.seconds = time.perf_counter() - start
            self.of[kind] += timer.seconds

    @property
    def seconds(self) -> float:
        """Of training, so far."""
        return max(time.perf_counter() - self.started - self.of["pause"], 1e-9)


class MetricRows:
    """The row of the last logged step, which waits for its numbers, and the meter of the steps since.

    The host reads the numbers of a row one step later, so it does not wait for steps that are still queued.

    schema     value of the column of that name
    flops      from the tokens so far to the operations for them
    columns    functions from further numbers of a row, by their name, to columns; a row need not have all of them
    evaluated  names of columns that an evaluation fills, in addition to val_loss
    peak       operations a second of one device, None where it is not known
    compiled   whether rows count what was compiled again
    """

    def __init__(
        self,
        device: torch.device,
        world_size: int,
        total_steps: int,
        *,
        schema: int,
        flops: Callable[[int], float],
        columns: Mapping[str, Columns],
        evaluated: Sequence[str] = (),
        peak: float | None = None,
        compiled: bool = False,
    ) -> None:
        self.meter = Meter()
        self._device, self._world_size, self._total_steps = device, world_size, total_steps
        self._schema, self._flops, self._columns = schema, flops, columns
        self._evaluated = dict.fromkeys(evaluated)
        self._peak, self._compiled = peak, compiled
        self._waiting: tuple[dict[str, Any], HostCopy] | None = None
        self._counted = 0.0  # seconds of the meter that `progress` has

    def count_seconds(self, progress: Counters) -> None:
        """Add the seconds since the last row to `progress`, so that a checkpoint between two rows has them."""
        seconds = self.meter.seconds
        progress.count(seconds - self._counted)
        self._counted = seconds

    def begin(
        self, progress: Counters, lr: float, digest: str, numbers: Mapping[str, Tensor]
    ) -> None:
        """Make the row of the last step, start the copy of its numbers to the host, and start a new meter.

        Adds the seconds of the meter to `progress`. `digest` identifies the data of the step. `numbers` are tensors by name: loss, grad_norm, verdicts, and those
        of `columns`.
        """
        self.count_seconds(progress)
        meter, self.meter = self.meter, Meter()
        seconds, self._counted = self._counted, 0.0
        flops = self._flops(progress.tokens)
        speed = (flops - self._flops(progress.tokens - meter.tokens)) / seconds

        row = {
            "step": progress.step,
            "schema": self._schema,
            **dict.fromkeys(("loss", "val_loss", "grad_norm")),
            "lr": lr,
            "tokens": progress.tokens,
            "tokens_per_second": meter.tokens / seconds,
            "flops": flops,
            "mfu": None if self._peak is None else speed / (self._peak * self._world_size),
            "data_wait_seconds": meter.of["wait"],
            "memory_bytes": _memory_bytes(self._device),
            "seconds": progress.seconds,
            "device_hours": progress.device_seconds / 3600,
            "seconds_left": seconds / meter.steps * (self._total_steps - progress.step),
            "instances": digest,
            "skipped_steps": 0,
            **self._evaluated,
        }

        if self._compiled:
            row["recompiled"] = recompilations()["recompiled"]
        self._waiting = row, HostCopy(numbers)

    def update(self, columns: Mapping[str, float]) -> None:
        """Set columns of the row that waits, if one does; what is not finite is None."""
        if self._waiting is not None:
            self._waiting[0].update(finite(columns))

    def at_start(self, columns: Mapping[str, float]) -> dict[str, Any]:
        """The row of an evaluation before the first step: no loss, no tokens, no seconds."""
        none = dict.fromkeys(("tokens", "flops", "seconds", "device_hours", "skipped_steps"), 0)
        counted = {"step": 0, "schema": self._schema, **none}
        row = dict.fromkeys(_OF_A_STEP) | counted | self._evaluated
        return row | finite(columns)

    @property
    def is_waiting(self) -> bool:
        """Whether a row waits for its numbers."""
        return self._waiting is not None

    def verdicts(self) -> list[float] | None:
        """Verdicts of the steps up to the row that waits; None without such a row."""
        return None if self._waiting is None else self._waiting[1].read()["verdicts"]

    def finish(self, skipped: int) -> dict[str, Any]:
        """The row that waits, with its numbers; `skipped`: steps without an update since the row before."""
        assert self._waiting is not None
        (row, copy), self._waiting = self._waiting, None
        numbers = copy.read()
        row |= finite({key: numbers[key][0] for key in ("loss", "grad_norm")})
        row["skipped_steps"] = skipped
        for key, columns in self._columns.items():
            row |= finite(columns(numbers[key])) if key in numbers else {}
        return row


def finite(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Columns with None for nan and inf, which JSON lacks; lists stay as they are."""
    return {
        name: value if isinstance(value, list) or math.isfinite(value) else None
        for name, value in columns.items()
    }


def _memory_bytes(device: torch.device) -> int:
    """Peak bytes of tensors on an accelerator; peak resident set of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
