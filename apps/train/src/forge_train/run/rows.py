"""How far a run is, and rows of metrics. A row is begun after a step and finished one step later, when its numbers are on the host; a meter
counts the time of the steps between two rows."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor

from forge_core.flops import peak_flops
from forge_parallel.compile import recompilations
from forge_parallel.host_copy import HostCopy
from forge_resilience import NumericsPolicy
from forge_train._shared.problems import invalid
from forge_train.config.schema import JobConfig
from forge_train.metrics.columns import SCHEMA

_COUNTERS = ("step", "tokens", "seconds")
_SINCE_ROW = ("skipped_since_row", "moe_since_row")
#: Columns that are None in a row without a step.
_OF_A_STEP = (
    *("loss", "val_loss", "grad_norm", "lr", "tokens_per_second", "mfu", "data_wait_seconds"),
    *("memory_bytes", "seconds_left", "instances"),
)
Columns = Callable[[list[float]], Mapping[str, Any]]


@dataclass
class Progress:
    """Counters that a checkpoint carries: optimizer steps, tokens seen, seconds of training, alone and times the ranks
    that trained in them; the verdicts of the steps so far, which checkpoints of version 0.1 lack; and how many steps
    the next row of metrics counts as skipped of those before the checkpoint, if it is between two rows.

    moe_since_row: what versions before saved of experts, now a part of the state of that extension.

    world_size: ranks of this life. The lives of a checkpoint without `device_seconds` count as if they had had as many.
    """

    policy: NumericsPolicy
    world_size: int = 1
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    device_seconds: float = 0.0
    skipped_since_row: int = 0
    moe_since_row: list[float] = field(default_factory=list)

    def count(self, seconds: float) -> None:
        """Add seconds of training of this life."""
        self.seconds += seconds
        self.device_seconds += seconds * self.world_size

    def state_dict(self) -> dict[str, Any]:
        counters = {name: getattr(self, name) for name in _COUNTERS}
        return counters | {
            "device_seconds": self.device_seconds,
            "policy": self.policy.state_dict(),
            "skipped_since_row": self.skipped_since_row,
        }

    def load_checks(self, state: Any) -> None:
        """Raise ValueError for values that no run can have saved."""
        values = [state.get(name) for name in _COUNTERS] if isinstance(state, dict) else []
        counts = [value for value in values[:2] if type(value) is int and value >= 0]
        times = [values[2], state.get("device_seconds", 0.0)] if values else [None]
        finite = all(_is_number(t) and t >= 0 for t in times)
        if len(counts) < 2 or not finite:
            rule = "must hold step, tokens and seconds of at least 0"
            raise invalid("progress", "damaged", state, rule)
        skipped, sums = (state.get(name, zero) for name, zero in zip(_SINCE_ROW, (0, [])))
        numbers = sums if isinstance(sums, list) else [None]
        if type(skipped) is not int or skipped < 0 or not all(map(_is_number, numbers)):
            rule = "must be a count and a list of finite numbers"
            raise invalid("progress.since_row", "damaged", [skipped, sums], rule)
        if "policy" in state:
            self.policy.load_checks(state["policy"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.tokens, self.seconds = (state[name] for name in _COUNTERS)
        self.device_seconds = state.get("device_seconds", self.seconds * self.world_size)
        self.skipped_since_row = state.get("skipped_since_row", 0)
        self.moe_since_row = state.get("moe_since_row", [])
        # without one, that of a new run: after a rollback this one has judged steps that are undone
        self.policy.load_state_dict(state.get("policy", NumericsPolicy().state_dict()))


@dataclass
class Timer:
    """How long something took, once it is over."""

    seconds: float = 0.0


class Meter:
    """Counts tokens and seconds of training steps; `pause` does not count, `wait` does.

    One object per window between two rows. No device synchronisation: on an accelerator the host is
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

    flops      from the tokens so far to the operations for them
    columns    functions from further numbers of a row, by their name, to columns; a row need not have all of them
    evaluated  names of columns that an evaluation fills, in addition to val_loss
    """

    def __init__(
        self,
        config: JobConfig,
        device: torch.device,
        world_size: int,
        total_steps: int,
        flops: Callable[[int], float],
        columns: Mapping[str, Columns],
        evaluated: Sequence[str] = (),
    ) -> None:
        self.meter = Meter()
        self._device, self._world_size, self._total_steps = device, world_size, total_steps
        self._flops, self._columns = flops, columns
        self._compiled = config.parallel.compile
        self._evaluated = dict.fromkeys(evaluated)
        # `peak_flops` has figures for bf16 only
        bf16 = config.parallel.precision == "bf16"
        self._peak = peak_flops(device, torch.bfloat16) if bf16 else None
        self._waiting: tuple[dict[str, Any], HostCopy] | None = None
        self._counted = 0.0  # seconds of the meter that `progress` has

    def count_seconds(self, progress: Progress) -> None:
        """Add the seconds since the last row to `progress`, so that a checkpoint between two rows has them."""
        seconds = self.meter.seconds
        progress.count(seconds - self._counted)
        self._counted = seconds

    def begin(
        self, progress: Progress, lr: float, digest: str, numbers: Mapping[str, Tensor]
    ) -> None:
        """Make the row of the last step, start the copy of its numbers to the host, and start a new meter.

        Adds the seconds of the meter to `progress`. `numbers` are tensors by name: loss, grad_norm, verdicts, and those
        of `columns`.
        """
        self.count_seconds(progress)
        meter, self.meter = self.meter, Meter()
        seconds, self._counted = self._counted, 0.0
        flops = self._flops(progress.tokens)
        speed = (flops - self._flops(progress.tokens - meter.tokens)) / seconds

        row = {
            "step": progress.step,
            "schema": SCHEMA,
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
        counted = {"step": 0, "schema": SCHEMA, **none}
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
        row["loss"], row["grad_norm"] = (_finite(numbers[key][0]) for key in ("loss", "grad_norm"))
        row["skipped_steps"] = skipped
        for key, columns in self._columns.items():
            found = columns(numbers[key]) if key in numbers else {}
            for name, value in found.items():
                row[name] = value if isinstance(value, list) else _finite(value)
        return row


def finite(columns: Mapping[str, float]) -> dict[str, float | None]:
    """Columns with None for nan and inf."""
    return {name: _finite(value) for name, value in columns.items()}


def _finite(number: float) -> float | None:
    """None for nan and inf, which JSON lacks."""
    return number if math.isfinite(number) else None


def _memory_bytes(device: torch.device) -> int:
    """Peak bytes of tensors on an accelerator; peak resident set of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, float | int) and math.isfinite(value)
