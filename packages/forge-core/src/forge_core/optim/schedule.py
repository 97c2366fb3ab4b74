"""Learning-rate schedules: functions from a step, counted from one, to a factor of the peak learning rate.

They depend only on the step and the length of the run, so a run that resumes needs no state of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from forge_core._shared.problems import invalid
from forge_core.optim.config import ScheduleConfig
from forge_core.registry import Registry

Schedule = Callable[[int], float]
#: A decay from 1 to 0, as a function of its progress x from 0 to 1.
Shape = Callable[[float], float]


def build_schedule(config: ScheduleConfig, total_steps: int) -> Schedule:
    """Return `factor(step)`, to be multiplied with the peak learning rate.

    `factor = build_schedule(ScheduleConfig(warmup_steps=100), 1000); optimizer.set_lr(3e-4 * factor(1))`

    Steps count from one. Warm-up is linear: step 1 has `1 / warmup_steps`, never zero, and step `warmup_steps` exactly 1.
    `cosine`, `linear`, `wsd` and `rex` then fall to exactly `min_lr_ratio` at `total_steps` and stay there;
    `inverse_sqrt` falls without end, `constant` stays at 1, and `none` is 1 without a warm-up. An entry point or an
    import path is called as `builder(config, total_steps, **config.options)`.

    Raises ValueError for an unknown name or option, `total_steps < 1`, a warm-up as long as the run, or a warm-up and a
    decay that overlap; the returned function raises it for a step below one.
    """
    if total_steps < 1:
        fix = "train for one step or more"
        raise invalid("total_steps", "range", total_steps, "must be at least 1", fix)
    warmup = config.warmup_steps
    if warmup >= total_steps:
        rule = f"must be below the {total_steps} steps of the run, or the peak rate is never used"
        fix = f"use {total_steps - 1} or fewer, or train longer"
        raise invalid("warmup_steps", "above_steps", warmup, rule, fix, where="schedule")
    builder = SCHEDULES.checked(config.name, config.options)
    schedule: Schedule = builder(config, total_steps, **config.options)
    return schedule


def check_schedule(config: ScheduleConfig) -> None:
    """Raise ValueError for an unknown name, or options that the schedule does not take; nothing is called."""
    SCHEDULES.checked(config.name, config.options)


def cosine(config: ScheduleConfig, total_steps: int) -> Schedule:
    """Warm-up, then half a cosine from 1 to `min_lr_ratio` (Loshchilov and Hutter 2016, equation 5, no restarts)."""
    return _falling(config, config.warmup_steps, total_steps, _half_cosine)


def linear(config: ScheduleConfig, total_steps: int) -> Schedule:
    """Warm-up, then a straight line from 1 to `min_lr_ratio`."""
    return _falling(config, config.warmup_steps, total_steps, _line)


def wsd(config: ScheduleConfig, total_steps: int) -> Schedule:
    """Warm-up, 1, and a fall to `min_lr_ratio` over the last steps (MiniCPM, Hu et al. 2024).

    The shape `sqrt` is 1 - sqrt(x) (Haegele et al. 2024), as good as a cosine there with a decay of a fifth of the run. A
    longer run has the same learning rates until the shorter one decays, so it can start from a checkpoint before that.
    """
    own = config.wsd
    steps = own.decay_steps or max(1, round(own.decay_fraction * total_steps))
    warmup = config.warmup_steps
    if warmup + steps > total_steps:
        rule = f"and the {steps} steps of decay must fit in the {total_steps} steps of the run"
        fix = "make either shorter, or train longer"
        raise invalid("warmup_steps", "overlap", warmup, rule, fix, where="schedule")
    return _falling(config, total_steps - steps, total_steps, _SHAPES[own.decay])


def rex(config: ScheduleConfig, total_steps: int) -> Schedule:
    """Warm-up, then (1 - x) / (1/2 + (1 - x) / 2) of the range from `min_lr_ratio` to 1 (Chen et al. 2021).

    The paper's schedule ends at zero: `min_lr_ratio = 0`.
    """
    return _falling(config, config.warmup_steps, total_steps, _reflected_exponential)


def inverse_sqrt(config: ScheduleConfig, total_steps: int) -> Schedule:
    """Warm-up, then sqrt(warmup_steps / step); without a warm-up 1 / sqrt(step) (Vaswani et al. 2017)."""
    scale = max(config.warmup_steps, 1)
    return _warmed(config.warmup_steps, lambda step: math.sqrt(scale / step))


def constant(config: ScheduleConfig, total_steps: int) -> Schedule:
    """Warm-up, then 1; the name `none` is this without a warm-up."""
    return _warmed(config.warmup_steps, lambda step: 1.0)


def _falling(config: ScheduleConfig, start: int, end: int, shape: Shape) -> Schedule:
    """Warm-up, 1 up to step `start`, then a decay to exactly `min_lr_ratio` at step `end`."""
    floor = config.min_lr_ratio

    def fall(step: int) -> float:
        done = min(1.0, max(0.0, (step - start) / (end - start)))
        return floor + (1.0 - floor) * shape(done)

    return _warmed(config.warmup_steps, fall)


def _warmed(warmup_steps: int, after: Schedule) -> Schedule:
    """A linear warm-up, then `after`."""

    def factor(step: int) -> float:
        if step < 1:
            rule = "must be at least 1: steps count from one"
            raise invalid("step", "range", step, rule, "add one to an index")
        return step / warmup_steps if step <= warmup_steps else after(step)

    return factor


def _half_cosine(done: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * done))


def _line(done: float) -> float:
    return 1.0 - done


def _one_minus_sqrt(done: float) -> float:
    return 1.0 - math.sqrt(done)


def _reflected_exponential(done: float) -> float:
    return (1.0 - done) / (0.5 + 0.5 * (1.0 - done))


_SHAPES: dict[str, Shape] = {"cosine": _half_cosine, "linear": _line, "sqrt": _one_minus_sqrt}

SCHEDULES = Registry(
    "schedule.name",
    "forge.schedules",
    ("config", "total_steps"),
    {
        "cosine": cosine,
        "linear": linear,
        "wsd": wsd,
        "rex": rex,
        "inverse_sqrt": inverse_sqrt,
        "constant": constant,
        "none": constant,
    },
)
