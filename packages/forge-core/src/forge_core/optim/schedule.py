"""Learning-rate schedules: functions from a step, counted from one, to a factor of the peak rate."""

from __future__ import annotations

import math
from collections.abc import Callable

from forge_core.optim.config import ScheduleConfig
from forge_core.registry import Registry

Schedule = Callable[[int], float]


def build_schedule(config: ScheduleConfig, total_steps: int) -> Schedule:
    """Return `factor(step)`, to be multiplied with the peak learning rate.

    `factor = build_schedule(ScheduleConfig(warmup_steps=100), 1000); optimizer.set_lr(3e-4 * factor(1))`

    Steps count from one. Warm-up is linear: step 1 has `1 / warmup_steps`, never zero, and step
    `warmup_steps` exactly 1. `cosine` then falls to exactly `min_lr_ratio` at `total_steps` and stays
    there; `constant` stays at 1. A schedule from elsewhere is called as
    `builder(config, total_steps, **config.options)`.

    Raises: ValueError for an unknown name or option, `total_steps < 1` or a warm-up as long as the run; the
        function it returns raises it for a step below one.
    """
    if total_steps < 1:
        raise ValueError(
            f"total_steps {total_steps} must be at least 1; train for one step or more"
        )
    if config.warmup_steps >= total_steps:
        raise ValueError(
            f"schedule: warmup_steps {config.warmup_steps} must be below the {total_steps} steps of the "
            f"run, or the peak rate is never used; use {total_steps - 1} or fewer, or train longer"
        )
    builder = SCHEDULES.checked(config.name, config.options)
    schedule: Schedule = builder(config, total_steps, **config.options)
    return schedule


def check_schedule(config: ScheduleConfig) -> None:
    """ValueError where the name leads nowhere, or the part does not take its options; nothing is called."""
    SCHEDULES.checked(config.name, config.options)


def cosine(config: ScheduleConfig, total_steps: int) -> Schedule:
    """Warm-up, then half a cosine from 1 to `min_lr_ratio` (Loshchilov and Hutter 2016, no restarts)."""
    floor, warmup = config.min_lr_ratio, config.warmup_steps

    def factor(step: int) -> float:
        _check_step(step)
        if step <= warmup:
            return step / warmup
        done = min(1.0, (step - warmup) / (total_steps - warmup))
        return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * done))

    return factor


def constant(config: ScheduleConfig, total_steps: int) -> Schedule:
    """Warm-up, then 1."""

    def factor(step: int) -> float:
        _check_step(step)
        return min(1.0, step / config.warmup_steps) if config.warmup_steps else 1.0

    return factor


def _check_step(step: int) -> None:
    if step < 1:
        raise ValueError(
            f"step {step} must be at least 1: steps count from one; add one to an index"
        )


SCHEDULES = Registry(
    "schedule.name",
    "forge.schedules",
    ("config", "total_steps"),
    {"cosine": cosine, "constant": constant},
)
