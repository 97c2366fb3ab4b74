"""[health]: probes of devices and nodes on all ranks; what is broken ends the run and names its node."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import nn

from forge_resilience.health import BROKEN, HealthCheck, RankFinding
from forge_train.config.schema import JobConfig
from forge_train.errors import HardwareError
from forge_train.run.extension import Extension
from forge_train.run.run import Run

_MOST_FINDINGS = 32


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
        nodes = self._check.nodes_at_fault(found)
        broken = [f for f in found if f.finding.state == BROKEN]
        self._run.recorder.record(
            "health",
            step=step,
            state="broken" if broken else "warn",
            cause=str((broken or found)[0]),
            rank=broken[0].rank if len(broken) == 1 else None,
            ranks=sorted({f.rank for f in broken}),
            nodes=nodes,
            is_known=bool(nodes),
            findings=[str(f) for f in found[:_MOST_FINDINGS]],
            num_findings=len(found),
            seconds_lost=round(time.perf_counter() - began, 4),
        )
        if broken and self._config.action == "stop":
            raise HardwareError(_problems(step, broken))


def _problems(step: int, broken: Sequence[RankFinding]) -> list[str]:
    return [f"step {step}: {found}; or set health.action = 'warn'" for found in broken[:_MOST_FINDINGS]]  # fmt: skip
