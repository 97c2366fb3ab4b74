"""resilience.replicas: copies of tensors, and memory between steps, compared; what differs stops the run or is told."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from forge_data import Batch
from forge_parallel import reshard
from forge_resilience.provenance import node_name
from forge_resilience.replicas import Mismatch, ReplicaCheck, training_tensors
from forge_train.config.schema import JobConfig
from forge_train.errors import HardwareError
from forge_train.run.extension import Extension
from forge_train.run.run import Run

_MOST_NAMES = 8


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
            self._tell(step, [m for m in found if m.kind == kind], hosts)
        if self._config.action == "stop":
            buffers = {name for name, _ in self._run.model.named_buffers()}
            raise HardwareError(_problems(step, found, hosts, buffers))

    def _tell(self, step: int, found: Sequence[Mismatch], hosts: Sequence[str]) -> None:
        ranks = sorted({rank for m in found for rank in m.ranks})
        known = all(m.is_known for m in found)
        self._run.recorder.record(
            "mismatch",
            step=step,
            kind=found[0].kind,
            rank=ranks[0] if known and len(ranks) == 1 else None,
            ranks=ranks,
            nodes=sorted({hosts[rank] for rank in ranks}),
            is_known=known,
            tensor=found[0].tensor,
            tensors=[m.tensor for m in found[:_MOST_NAMES]],
            num_tensors=len(found),
        )

    def _tensors(self) -> dict[str, Any]:
        reshard(self._run.model)  # an evaluation leaves copies of weights gathered
        return training_tensors(self._run.model, self._run.optimizer)


def _problems(
    step: int, found: Sequence[Mismatch], hosts: Sequence[str], buffers: Collection[str]
) -> list[str]:
    """One sentence for each rank that is named, with its node."""
    by_ranks: dict[tuple[int, ...], list[Mismatch]] = {}
    for mismatch in found:
        by_ranks.setdefault(mismatch.ranks, []).append(mismatch)
    problems = []
    for ranks, some in by_ranks.items():
        nodes = ", ".join(dict.fromkeys(hosts[rank] for rank in ranks))
        more = f" (and {len(some) - 1} more tensors)" if len(some) > 1 else ""
        fix = "so that hardware is at fault: run again without that node"
        if all(m.tensor in buffers for m in some):
            fix += ", or, if the model's forward writes to it, register that buffer with persistent=False"
        problems.append(
            f"step {step}: {some[0]}{more} on {nodes}; copies must be equal bit by bit and memory must keep its "
            f"values, {fix}. This step was not saved, and what was saved with resilience.replicas on had been compared"
        )
    return problems
