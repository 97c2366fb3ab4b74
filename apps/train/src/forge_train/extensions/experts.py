"""Mixtures of experts in a run: weights of their losses, biases, and columns of the routers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from forge_data import Batch
from forge_moe.hooks import MoEHooks, num_experts_by_layer
from forge_parallel.structure import stages_of
from forge_train.config.schema import JobConfig
from forge_train.run.extension import Extension
from forge_train.run.run import Run
from forge_vlm.experimental import MoMa, MoMaSteps, set_row_group


class Experts(Extension):
    """Layers of forge_moe and of the fusion MoMa."""

    name = "experts"

    def __init__(self, num_experts: Mapping[str, int]) -> None:
        self._num_experts = num_experts
        self._sums: list[float] | None = None

    @classmethod
    def of(cls, config: JobConfig, model: nn.Module) -> Experts | None:
        """`model` is not sharded yet: a stage of a pipeline may have no mixture."""
        num_experts = num_experts_by_layer(model)
        has_groups = any(isinstance(module, MoMa) for module in model.modules())
        return cls(num_experts) if num_experts or has_groups else None

    def start(self, run: Run) -> None:
        meshes, config = run.meshes, run.job.config
        # with sequences or heads cut over ranks, the tokens of one row are cut too
        row_groups = [axis.group for axis in (meshes.cp, meshes.tp) if axis.size > 1]
        self._run, self._each_expert = run, config.metrics.expert_loads
        self._hooks = MoEHooks(
            run.model,
            stage_group=meshes.stage.group,
            row_groups=row_groups,
            num_experts=self._num_experts,
            device=meshes.device,
        )
        self._moma = MoMaSteps(stages_of(run.model), config.run.seed, meshes.device)
        if meshes.cp.size > 1:
            set_row_group(run.model, meshes.cp.group)
        self._restore()

    def before_forward(self, step: int, batch: Batch) -> None:
        loader = self._run.loader
        each, more = divmod(loader.global_batch // loader.micro_batch, loader.world_size)
        self._moma.begin(step, loader.rank * each + min(loader.rank, more))

    def token_counts(self, batch: Batch) -> Sequence[int]:
        """Tokens of documents, where there are MoE layers, then those of each group of MoMa."""
        once = int(self._run.meshes.is_batch_leader)  # one of the ranks that read the same rows
        of_layers = self._hooks.count_tokens(batch.document_ids)
        of_groups = self._moma.count_tokens(batch.tokens, batch.document_ids)
        return tuple(once * number for number in (*of_layers, *of_groups))

    def set_token_counts(self, sums: Sequence[int]) -> None:
        """The losses of routers are means over these tokens, whatever the micro-batch of one."""
        if self._hooks.routes:
            self._hooks.set_tokens(sums[0])
        self._moma.set_tokens(sums[int(self._hooks.routes) :])

    def after_update(self, step: int, bad: Tensor) -> None:
        self._hooks.end_step(step - 1, self._run.total_steps, bad)

    def numbers(self, step: int) -> Tensor | None:
        return self._hooks.take()

    def columns(self, numbers: Sequence[float]) -> Mapping[str, Any]:
        loads = self._hooks.loads(numbers) if self._each_expert else {}
        return {**self._hooks.columns(numbers), **loads}

    def after_evaluation(self) -> None:
        self._hooks.forget()

    def before_save(self, step: int) -> None:
        self._sums = self._hooks.state_dict()

    def after_rollback(self, step: int) -> None:
        self._restore()

    def _restore(self) -> None:
        """Go on from the sums of the loaded checkpoint; versions before kept them in the progress."""
        found = self._run.progress.moe_since_row if self._sums is None else self._sums
        self._hooks.load_state_dict(found)

    def state_dict(self) -> dict[str, Any]:
        """What the next row counts of the steps before the checkpoint, if it is between two rows."""
        return {"since_row": self._sums or []}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sums = state["since_row"]
