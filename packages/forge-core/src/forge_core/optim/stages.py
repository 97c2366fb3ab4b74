"""Stages of a run: from a step on, groups of parameters have other learning rates, or are frozen."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from forge_core._shared.problems import Problem, invalid, raise_problems
from forge_core.optim.config import OptimizerConfig
from forge_core.optim.groups import match_groups, set_multipliers


@dataclass(frozen=True)
class StageConfig:
    """Settings that change at a step: `StageConfig(start_step=1001, lr_multipliers={"vision": 0.1})`.

    Raises ValueError for a step below 1 and for multipliers that are negative or not finite.
    """

    start_step: int = dataclasses.field(
        metadata={
            "help": "first optimizer step of the stage, counted from 1; it lasts until changed"
        }
    )
    lr_multipliers: dict[str, float] = dataclasses.field(
        metadata={
            "help": "group of optimizer.groups = its lr_multiplier from then on; 0 freezes it, others "
            "keep theirs"
        }
    )

    def __post_init__(self) -> None:
        raise_problems("", self._problems())

    def _problems(self) -> Iterator[Problem]:
        start, given = self.start_step, self.lr_multipliers
        if start < 1:
            yield Problem(
                "start_step", "range", start, "must be at least 1, the first step", "use 1"
            )
        if not given:
            fix = "write {vision = 0.0} or so"
            yield Problem("lr_multipliers", "missing", given, "must name a group", fix)
        for group, value in given.items():
            if not 0.0 <= value < math.inf:
                rule = "must be a finite number of at least 0"
                yield Problem(f"lr_multipliers.{group}", "range", value, rule, "use 0 to freeze it")


def multipliers_at(
    config: OptimizerConfig, stages: Mapping[str, StageConfig], step: int
) -> dict[str, float]:
    """Return {group: multiplier} of a step, counted from one.

    A group starts with its own `lr_multiplier`, and keeps the one of the latest stage that names it.
    """
    found = {name: group.lr_multiplier for name, group in config.groups.items()}
    for stage in in_order(stages).values():
        if stage.start_step <= step:
            found |= stage.lr_multipliers
    return found


def in_order(stages: Mapping[str, StageConfig]) -> dict[str, StageConfig]:
    """Return stages by name, the earliest first."""
    return dict(sorted(stages.items(), key=lambda item: item[1].start_step))


def stage_problems(
    config: OptimizerConfig, stages: Mapping[str, StageConfig], total_steps: int | None = None
) -> list[Problem]:
    """Return the problems of stages that contradict the groups, each other or the length of a run."""
    problems: list[Problem] = []
    ordered = in_order(stages)
    for before, after in zip(ordered, list(ordered)[1:]):
        step = ordered[before].start_step
        if step == ordered[after].start_step:
            key, fix = f"train.stages.{after}.start_step", "make them one stage, or start one later"
            rule = f"must differ from start_step of train.stages.{before}"
            problems.append(Problem(key, "duplicate", step, rule, fix))

    for name, stage in ordered.items():
        key, known = f"train.stages.{name}", ", ".join(config.groups) or "none"
        rule = f"must be a group of optimizer.groups, which are {known}"
        for group in (g for g in stage.lr_multipliers if g not in config.groups):
            fix = f"correct it, or add [optimizer.groups.{group}]"
            problems.append(Problem(f"{key}.lr_multipliers", "unknown", group, rule, fix))

        start = stage.start_step
        if total_steps is not None and start > total_steps:
            rule = f"must be at most {total_steps}, the steps of the run, or the stage is never reached"
            fix = "start it earlier or train longer"
            problems.append(Problem(f"{key}.start_step", "above_steps", start, rule, fix))
    return problems


def never_trained(config: OptimizerConfig, stages: Mapping[str, StageConfig]) -> list[str]:
    """Return the groups that are frozen from the first step to the last."""
    steps = [1, *(stage.start_step for stage in stages.values())]
    found = [multipliers_at(config, stages, step) for step in steps]
    return [name for name in config.groups if not any(now[name] for now in found)]


def check_something_trains(
    model: nn.Module, config: OptimizerConfig, stages: Mapping[str, StageConfig]
) -> None:
    """Raise ValueError, with the key of the stage, if a step would have no parameter to train.

    `model` may be on the meta device. Also raises as `match_groups`.
    """
    owners = match_groups(model, config.groups)
    trainable = {owners.get(name) for name, p in model.named_parameters() if p.requires_grad}
    starts = {
        "optimizer.groups": 1,
        **{f"train.stages.{n}": s.start_step for n, s in stages.items()},
    }
    for key, step in starts.items():
        now = multipliers_at(config, stages, step)
        if not any(owner is None or now[owner] for owner in trainable):
            rule = f"must leave parameters to train: every parameter is frozen from step {step} on"
            raise invalid(key, "frozen", ..., rule, "give one group an lr_multiplier above 0")


def freeze_never_trained(
    model: nn.Module, config: OptimizerConfig, stages: Mapping[str, StageConfig]
) -> None:
    """Set `requires_grad` False for parameters that no stage trains: they get no optimizer state.

    Call it before the model is sharded and the optimizer built.
    """
    frozen = set(never_trained(config, stages))
    owners = match_groups(model, config.groups) if frozen else {}
    for name, parameter in model.named_parameters():
        if owners.get(name) in frozen:
            parameter.requires_grad_(False)


class Stages:
    """Applies the stage of each step: a function of the configuration and the step, so a run can resume within one.

    stages = Stages(config, {"thaw": StageConfig(1001, {"vision": 0.1})}, optimizer)
    stages.enter(step)                                 # before the forward
    """

    def __init__(
        self, config: OptimizerConfig, stages: Mapping[str, StageConfig], optimizer: Any
    ) -> None:
        self._config, self._stages, self._optimizer = config, in_order(stages), optimizer
        self._multipliers: dict[str, float] = {}

    def enter(self, step: int) -> tuple[str | None, dict[str, float]] | None:
        """Set the multipliers of groups for `step`, counted from 1; 0 freezes a group.

        Returns (name of the stage or None before the first, multipliers by group) if they changed, also at the first
        call; else None. Under FSDP2 call `forge_parallel.follow_requires_grad(model)` after a change.
        """
        wanted = multipliers_at(self._config, self._stages, step)
        if wanted == self._multipliers:
            return None
        self._multipliers = wanted
        set_multipliers(self._optimizer, wanted)
        started = [name for name, stage in self._stages.items() if step >= stage.start_step]
        return (started[-1] if started else None), wanted
