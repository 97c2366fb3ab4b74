"""metrics.gradients_every_steps: columns of the gradients of blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from forge_data import Batch
from forge_parallel.gradient_statistics import GradientStatistics
from forge_train.config.schema import JobConfig
from forge_train.run.extension import Extension
from forge_train.run.run import Run


class Gradients(Extension):
    """Norm, signal and noise of the gradients of each block, in the rows of the steps that are due."""

    @classmethod
    def of(cls, config: JobConfig, model: nn.Module) -> Gradients | None:
        return cls() if config.metrics.gradients_every_steps else None

    def start(self, run: Run) -> None:
        self._run, self._every = run, run.job.config.metrics.gradients_every_steps
        self._statistics = GradientStatistics(run.model, run.meshes)
        self._numbers: Tensor | None = None

    def wants_row(self, step: int) -> bool:
        return step % self._every == 0

    def around_backward(self, step: int) -> AbstractContextManager[Any] | None:
        return self._statistics.watch() if self.wants_row(step) else None

    def after_backward(self, step: int, batch: Batch) -> None:
        if self.wants_row(step):
            parts = batch.split(self._run.compute.micro_batch)
            self._numbers = self._statistics.take([self._run.label_weight(part) for part in parts])

    def numbers(self, step: int) -> Tensor | None:
        numbers, self._numbers = self._numbers, None
        return numbers

    def columns(self, numbers: Sequence[float]) -> Mapping[str, Any]:
        return self._statistics.columns(numbers)
