"""[health]: probes of devices and nodes on all ranks; what is broken ends the run and names its node."""

from __future__ import annotations

import time

from torch import nn

from forge_resilience.health import BROKEN, MOST_FINDINGS, HealthCheck
from forge_train.config.schema import JobConfig
from forge_train.errors import HardwareError
from forge_train.run.extension import Extension
from forge_train.run.run import Run


class Health(Extension):
    """Probes at the start of a life and every so many steps; writes the event `health` if not all is well.

    HardwareError on all ranks for what is broken, where that is to stop a run: nothing is saved, as what a broken device has
    computed cannot be trusted.
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
