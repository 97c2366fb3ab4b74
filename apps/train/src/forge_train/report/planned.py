"""What a configuration plans over a run, the learning rate of each group and the batch; and its model's parameters."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from forge_core.optim import describe_parameters, draw_rates, multipliers_at
from forge_train._shared.problems import invalid
from forge_train.build.build import Course, build_trained, freeze_groups, run_schedule, total_steps
from forge_train.config.schema import JobConfig
from forge_train.errors import ConfigError, config_errors

_POINTS = 2000
_FORMATS = (".png", ".svg", ".pdf")


class Planned(NamedTuple):
    """Numbers at `steps`: rates by group, "others" those of no group, and tokens per step."""

    steps: list[int]
    rates: dict[str, list[float]]
    tokens: list[int]


def planned(config: JobConfig) -> Planned:
    """What the run will do at every step, or at about 2000 and every edge of a longer run.

    A frozen group has rate 0. Factors of single parameters (mup, Muon's `adamw_lr_multiplier`) are not in it, and
    rollbacks that lower the rate are not foreseen. Builds the model where the length
    of the run depends on its size. Raises ConfigError as the run would.
    """
    total, course = _length(config), Course(config)
    with config_errors("schedule"):
        factor = run_schedule(config, total)
    steps = _steps(config, course, total)

    rates: dict[str, list[float]] = {}
    tokens = []
    for step in steps:
        segment, before, own = course.at_step(step)
        tokens.append(own)
        scheduled = course.scheduled(step, before + own)
        rate = config.optimizer.lr * factor(scheduled) * segment.lr_multiplier
        multipliers = multipliers_at(config.optimizer, config.train.stages, step)
        for group, multiplier in {"others": 1.0, **multipliers}.items():
            rates.setdefault(group, []).append(rate * multiplier)
    return Planned(steps, rates, tokens)


def phase_lines(config: JobConfig) -> list[str]:
    """A line for each phase of the data: where it begins, and what is new."""
    return Course(config).lines(_length(config))


def _length(config: JobConfig) -> int:
    by_size = config.train.tokens_per_parameter is not None
    return total_steps(config, build_trained(config) if by_size else None)


def _steps(config: JobConfig, course: Course, total: int) -> list[int]:
    """Every step of a short run; of a long one some, with those on both sides of each edge."""
    edges = [1, total, config.schedule.warmup_steps, config.schedule.warmup_steps + 1]
    edges += [total - (config.schedule.wsd.decay_steps or 0)]
    for point in course.points[1:]:
        edges += [point.steps - 1, point.steps, point.steps + 1]
    for stage in config.train.stages.values():
        edges += [stage.start_step - 1, stage.start_step]
    some = range(1, total + 1, -(-total // _POINTS))
    return sorted({*some, *(step for step in edges if 1 <= step <= total)})


def check_picture(path: Path) -> None:
    """ConfigError where a picture could not be written there, or matplotlib is missing."""
    if path.suffix not in _FORMATS:
        rule, fix = "must end in .png, .svg or .pdf", f"use {path.stem}.png"
        raise invalid("--plot", "name", str(path), rule, fix, kind=ConfigError)
    if not path.parent.is_dir():
        rule, fix = f"must be in a folder that exists, and {path.parent} does not", "make it first"
        raise invalid("--plot", "not_found", str(path), rule, fix, kind=ConfigError)
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        rule, fix = "needs matplotlib, which is not installed", "pip install 'forge-train[plot]'"
        raise invalid("--plot", "requires", ..., rule, fix, kind=ConfigError) from error


def draw_plan(config: JobConfig, path: Path) -> str:
    """Draw `planned` into a file, and return a line about it."""
    plan = planned(config)
    draw_rates(*plan, path)
    return f"learning rates and batch over {plan.steps[-1]} steps: {path}"


def parameter_lines(config: JobConfig) -> list[str]:
    """`describe_parameters` of a job's model, which is built on the meta device if it is a built-in one.

    ConfigError as a run, for what does not fit the model.
    """
    model = build_trained(config)
    freeze_groups(model, config)
    with config_errors():
        return describe_parameters(model, config.optimizer)
