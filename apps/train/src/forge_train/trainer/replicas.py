"""resilience.replicas: copies of tensors, and memory between steps, compared; what differs stops the run or is told."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from forge_parallel import Meshes, reshard
from forge_resilience import Agreement
from forge_resilience.provenance import node_name
from forge_resilience.replicas import Mismatch, ReplicaCheck, ReplicasConfig, training_tensors
from forge_train.errors import HardwareError

_MOST_NAMES = 8


class ReplicaPolicy:
    """Compares every so many steps and before each save; `record` writes the event `mismatch`.

    Weights, saved buffers and the optimizer's tensors are sealed after a step and compared before the next
    forward. Hooks may change them, so a hook in between breaks the seal; copies are compared in any case.
    """

    def __init__(
        self,
        config: ReplicasConfig,
        model: nn.Module,
        optimizer: Any,
        meshes: Meshes,
        record: Callable[..., None],
    ) -> None:
        stage = meshes.stage.group
        plain = [meshes.rank] if stage is None else dist.get_process_group_ranks(stage)
        self._check = ReplicaCheck(meshes.host_group, plain=plain)
        self._agreement = Agreement(meshes.host_group)
        self._config, self._model, self._optimizer = config, model, optimizer
        self._record = record
        self._due = False
        self._compared = -1

    def seal(self, step: int) -> None:
        """After `step` and its hooks: note checksums if a comparison is due; no sync."""
        every = self._config.every_steps
        self._due = every > 0 and step % every == 0
        if self._due:
            self._check.seal(self._tensors())

    def unseal(self) -> None:
        """A hook may have changed tensors."""
        self._check.unseal()

    def forget(self) -> None:
        """After a rollback: the tensors are those of another step."""
        self._check.unseal()
        self._due, self._compared = False, -1

    def before_forward(self, step: int) -> None:
        """Compare, if that is due after `step`. HardwareError on all ranks if bits differ and that is to stop a run."""
        if self._due:
            self._compare(step)
        self._due = False
        self._check.unseal()

    def before_save(self, step: int) -> None:
        """The same for any step that is saved, so that checkpoints hold what was compared."""
        if self._config.every_steps and self._compared != step:
            self._compare(step)

    def _compare(self, step: int) -> None:
        found = self._check.compare(self._tensors())
        self._compared = step
        if not found:
            return
        hosts: list[str] = self._agreement.exchange(node_name())
        for kind in dict.fromkeys(m.kind for m in found):
            self._tell(step, [m for m in found if m.kind == kind], hosts)
        if self._config.action == "stop":
            buffers = {name for name, _ in self._model.named_buffers()}
            raise HardwareError(_problems(step, found, hosts, buffers))

    def _tell(self, step: int, found: Sequence[Mismatch], hosts: Sequence[str]) -> None:
        ranks = sorted({rank for m in found for rank in m.ranks})
        known = all(m.is_known for m in found)
        self._record(
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
        reshard(self._model)  # an evaluation leaves copies of weights gathered
        return training_tensors(self._model, self._optimizer)


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
