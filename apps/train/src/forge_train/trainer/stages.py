"""train.stages: groups of parameters that are frozen, trained and given other rates as a run goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from forge_core.optim import (
    check_something_trains,
    freeze_never_trained,
    in_order,
    multipliers_at,
    set_multipliers,
    stage_problems,
)
from forge_parallel import follow_requires_grad
from forge_train.config.schema import JobConfig
from forge_train.errors import ConfigError, as_config_error
from forge_train.trainer.build import total_steps


def freeze_groups(model: nn.Module, config: JobConfig) -> None:
    """Check groups and stages on the whole model, and freeze what the run never trains. ConfigError."""
    if not config.optimizer.groups:
        return
    stages = config.train.stages
    if problems := stage_problems(config.optimizer, stages, total_steps(config, model)):
        raise ConfigError(problems)
    as_config_error(lambda: check_something_trains(model, config.optimizer, stages))
    freeze_never_trained(model, config.optimizer, stages)


class Stages:
    """The stage of a step: a function of the configuration and the step, so a run resumes in the middle of one."""

    def __init__(self, config: JobConfig, model: nn.Module, optimizer: Any) -> None:
        self._config, self._stages = config.optimizer, in_order(config.train.stages)
        self._model, self._optimizer = model, optimizer
        self._multipliers: dict[str, float] = {}

    def enter(self, step: int, record: Callable[..., None]) -> None:
        """Before the forward of `step`, counted from one: what its stage freezes is frozen, the rest is trained.

        An event `stage` says what changed, also at the first step of a run and of a resumed one.
        """
        wanted = multipliers_at(self._config, self._stages, step)
        if wanted == self._multipliers:
            return
        self._multipliers = wanted
        set_multipliers(self._optimizer, wanted)
        follow_requires_grad(self._model)
        started = [name for name, stage in self._stages.items() if stage.start_step <= step]
        name = started[-1] if started else None
        record("stage", step=step, name=name, lr_multipliers=wanted)
