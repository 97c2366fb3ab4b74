"""[health]: probes of devices and nodes on all ranks; what is broken ends the run and names its node."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import torch

from forge_parallel import Meshes
from forge_resilience.health import BROKEN, HealthCheck, HealthConfig, RankFinding
from forge_train.errors import HardwareError

_MOST_FINDINGS = 32


class HealthPolicy:
    """Probes at the start of a life and every so many steps; `record` writes the event `health` if not all is well.

    HardwareError on all ranks for what is broken, where that is to stop a run: nothing is saved, as what a broken
    device has computed cannot be trusted.
    """

    def __init__(
        self,
        config: HealthConfig,
        folder: str | os.PathLike[str],
        device: torch.device,
        meshes: Meshes,
        record: Callable[..., None],
    ) -> None:
        self._config, self._record = config, record
        self._check: HealthCheck | None = None
        if config.at_start or config.every_steps:
            self._check = HealthCheck(folder, device, config, meshes.host_group)

    def at_start(self, step: int) -> None:
        """Before the first step of a life. Collective."""
        if self._config.at_start:
            self._probe(step)

    def after_step(self, step: int) -> None:
        """Between two steps, before the first is saved. Collective."""
        if self._config.every_steps and step % self._config.every_steps == 0:
            self._probe(step)

    def _probe(self, step: int) -> None:
        assert self._check is not None
        began = time.perf_counter()
        found = self._check.run()
        if not found:
            return
        nodes = self._check.nodes_at_fault(found)
        broken = [f for f in found if f.finding.state == BROKEN]
        self._record(
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
