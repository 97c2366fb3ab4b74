"""resilience.replicas: copies of tensors, and memory between steps, compared; what differs stops the run or is told."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from forge_data import Batch
from forge_parallel import reshard
from forge_resilience.provenance import node_name
from forge_resilience.replicas import (
    ReplicaCheck,
    mismatch_fields,
    mismatch_lines,
    training_tensors,
)
from forge_train.config.schema import JobConfig
from forge_train.errors import HardwareError
from forge_train.run.extension import Extension
from forge_train.run.run import Run


class Replicas(Extension):
    """Compares every so many steps and before each save; writes the event `mismatch`.

    Weights, saved buffers and the optimizer's tensors are sealed after a step and compared before the next forward. Hooks
    may change them, so a hook in between breaks the seal; copies are compared in any case.
    """

    @classmethod
    def of(cls, config: JobConfig, model: nn.Module) -> Replicas | None:
        return cls() if config.resilience.replicas.every_steps else None

    def start(self, run: Run) -> None:
        stage, meshes = run.meshes.stage.group, run.meshes
        plain = [meshes.rank] if stage is None else dist.get_process_group_ranks(stage)
        self._check = ReplicaCheck(meshes.host_group, plain=plain)
        self._run, self._config = run, run.job.config.resilience.replicas
        self._due, self._compared = False, -1

    def before_forward(self, step: int, batch: Batch) -> None:
        """Compare, if that is due after the step before. HardwareError on all ranks if bits differ and that is to stop a run."""
        if self._due:
            self._compare(step - 1)
        self._due = False
        self._check.unseal()

    def after_step(self, step: int) -> None:
        """After the hooks of others: note checksums if a comparison is due; no sync."""
        self._due = step % self._config.every_steps == 0
        if self._due:
            self._check.seal(self._tensors())

    def before_save(self, step: int) -> None:
        """The same for any step that is saved, so that checkpoints hold what was compared."""
        if self._compared != step:
            self._compare(step)

    def weights_may_have_changed(self) -> None:
        self._check.unseal()

    def after_rollback(self, step: int) -> None:
        self._check.unseal()
        self._due, self._compared = False, -1

    def _compare(self, step: int) -> None:
        found = self._check.compare(self._tensors())
        self._compared = step
        if not found:
            return
        hosts: list[str] = self._run.agreement.exchange(node_name())
        for kind in dict.fromkeys(m.kind for m in found):
            fields = mismatch_fields([m for m in found if m.kind == kind], hosts)
            self._run.recorder.record("mismatch", step=step, kind=kind, **fields)
        if self._config.action == "stop":
            buffers = {name for name, _ in self._run.model.named_buffers()}
            saved = "This step was not saved, and what was saved with resilience.replicas on had been compared"
            lines = mismatch_lines(found, hosts, buffers)
            raise HardwareError([f"step {step}: {line}. {saved}" for line in lines])

    def _tensors(self) -> dict[str, Any]:
        reshard(self._run.model)  # an evaluation leaves copies of weights gathered
        return training_tensors(self._run.model, self._run.optimizer)
