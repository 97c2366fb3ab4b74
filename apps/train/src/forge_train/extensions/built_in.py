"""Optional features of a run, which the training loop does not know: their order, and those of one small class."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from forge_core.optim import Stages
from forge_data import Batch
from forge_parallel import follow_requires_grad
from forge_parallel.gradient_statistics import GradientStatistics
from forge_parallel.profile import ProfileWindow
from forge_resilience.health import BROKEN, MOST_FINDINGS, HealthCheck
from forge_train._shared.problems import Problem
from forge_train.config.schema import JobConfig
from forge_train.errors import HardwareError
from forge_train.extensions.adapters import Adapters
from forge_train.extensions.experts import Experts
from forge_train.extensions.replicas import Replicas
from forge_train.run.extension import Extension
from forge_train.run.run import Run


def extensions_of(
    config: JobConfig, model: nn.Module, users: Sequence[Extension]
) -> list[Extension]:
    """The extensions that a job needs, and those of users. `model` is not sharded yet."""
    found: list[Extension] = []
    for kind in ORDER:
        if kind is None:
            found += users
        elif (extension := kind.of(config, model)) is not None:
            found.append(extension)
    return found


class FreezingStages(Extension):
    """[train.stages] and [optimizer.groups]: freezes and scales groups by the stage of a step, before its forward."""

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
            # again: a fully frozen encoder stays in eval mode
            self._run.model.train()
            name, multipliers = change
            self._run.recorder.record("stage", step=step, name=name, lr_multipliers=multipliers)


class Gradients(Extension):
    """metrics.gradients_every_steps: norm, signal and noise of the gradients of each block, as columns."""

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
            micro_batches = batch.split(self._run.compute.micro_batch)
            weights = [self._run.label_weight(each) for each in micro_batches]
            self._numbers = self._statistics.take(weights)

    def numbers(self, step: int) -> Tensor | None:
        numbers, self._numbers = self._numbers, None
        return numbers

    def columns(self, numbers: Sequence[float]) -> Mapping[str, Any]:
        return self._statistics.columns(numbers)


class Health(Extension):
    """[health]: probes of devices and nodes at each start and every so many steps; event `health` if not all is well.

    HardwareError on all ranks, with the node, if health.action is 'stop': nothing is saved, as results of a broken device
    cannot be trusted.
    """

    @classmethod
    def of(cls, config: JobConfig, model: nn.Module) -> Health | None:
        return cls() if config.health.at_start or config.health.every_steps else None

    def start(self, run: Run) -> None:
        self._run, self._config = run, run.job.config.health
        self._check = HealthCheck(run.folder.path, run.device, self._config, run.meshes.host_group)
        if self._config.at_start:
            self._probe(run.progress.step)

    def after_step(self, step: int) -> None:
        """Before the step is saved."""
        if self._config.every_steps and step % self._config.every_steps == 0:
            self._probe(step)

    def _probe(self, step: int) -> None:
        began = time.perf_counter()
        found = self._check.run()
        if not found:
            return
        lost = round(time.perf_counter() - began, 4)
        fields = self._check.event_fields(found)
        self._run.recorder.record("health", step=step, **fields, seconds_lost=lost)

        broken = [f for f in found if f.finding.state == BROKEN]
        if broken and self._config.action == "stop":
            fix = "or set health.action = 'warn'"
            raise HardwareError([f"step {step}: {f}; {fix}" for f in broken[:MOST_FINDINGS]])


class Profile(Extension):
    """[profile]: profiles the steps of each window, and writes it after the window's last step."""

    @classmethod
    def of(cls, config: JobConfig, model: nn.Module) -> Profile | None:
        return cls() if config.profile.num_steps else None

    def problems(self, config: JobConfig, world_size: int, total_steps: int) -> Iterable[Problem]:
        found = config.profile.run_problems(world_size, total_steps)
        return (problem.under("profile") for problem in found)

    @contextlib.contextmanager
    def around_run(self, run: Run) -> Iterator[None]:
        config, rank = run.job.config.profile, run.meshes.rank
        self._run = run
        self._window = ProfileWindow(
            run.folder.profile,
            start_step=config.start_step,
            num_steps=config.num_steps if rank in config.ranks else 0,
            every_steps=config.every_steps,
            rank=rank,
            device=run.device,
            memory=config.memory,
        )
        try:
            yield
        finally:
            self._window.close()

    @contextlib.contextmanager
    def around_step(self, step: int) -> Iterator[None]:
        with self._window.step(step):
            yield
        if self._window.is_full:
            self._write(step)

    def after_update(self, step: int, bad: Tensor) -> None:
        self._window.measure(self._run.model, self._run.optimizer)

    def _write(self, step: int) -> None:
        """Write the window that ended with this step. An OSError costs the profile, not the run."""
        with self._run.phase("profile") as pause:
            try:
                self._window.write()
                outcome = {}
            except OSError as error:
                outcome = {"error": str(error)}
        seconds, rank = pause.seconds, self._run.meshes.rank
        self._run.recorder.record("profile", step=step, rank=rank, seconds=seconds, **outcome)


#: All kinds in the order of their calls (`Extension` lists the hooks that reverse it). None: those of users.
ORDER = (Adapters, Replicas, Profile, None, FreezingStages, Experts, Gradients, Health)
