"""[train.stages] and the multipliers of [optimizer.groups]: which parameters are trained, and how fast."""

from __future__ import annotations

from torch import nn

from forge_core.optim import Stages
from forge_data import Batch
from forge_parallel import follow_requires_grad
from forge_train.config.schema import JobConfig
from forge_train.run.extension import Extension
from forge_train.run.run import Run


class FreezingStages(Extension):
    """Freezes, thaws and scales the groups as the stage of a step says, before its forward."""

    @classmethod
    def of(cls, config: JobConfig, model: nn.Module) -> FreezingStages | None:
        return cls() if config.optimizer.groups or config.train.stages else None

    def start(self, run: Run) -> None:
        config = run.job.config
        self._run = run
        self._stages = Stages(config.optimizer, config.train.stages, run.optimizer)

    def before_forward(self, step: int, batch: Batch) -> None:
        change = self._stages.enter(step)
        if change is not None:
            follow_requires_grad(self._run.model)
            # again: an encoder that nothing trains any more stays in eval mode
            self._run.model.train()
            name, multipliers = change
            self._run.recorder.record("stage", step=step, name=name, lr_multipliers=multipliers)
