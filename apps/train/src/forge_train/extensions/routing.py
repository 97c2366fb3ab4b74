"""Router losses of a step: the tokens that they are means over, and the micro-batch that comes next."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from forge_data import Batch, Loader
from forge_moe.hooks import MoEHooks
from forge_parallel import Meshes
from forge_parallel.structure import stages_of
from forge_vlm.fusion import MoMa, set_routing_step, set_row_group


class RoutingSteps:
    """Weights the router losses of MoE and MoMa layers by tokens, and numbers the micro-batches for the noise of MoMa.

        routing.begin(step, loader)                          # before the forwards of a step
        counts = routing.count_tokens(batch)                 # this rank's, to be added up over all ranks
        routing.set_tokens(sums)                             # before the first backward

    Each token of the step has the same weight then, whatever its micro-batch. Each stage of a pipeline runs all
    micro-batches of its reader in their order. Evaluations, in which nothing is drawn, do not count. Without such layers
    nothing happens.
    """

    def __init__(self, model: nn.Module, seed: int, meshes: Meshes, moe: MoEHooks) -> None:
        self._seed, self._meshes, self._moe = seed, meshes, moe
        self._step, self._first = 0, 0
        stages = stages_of(model)
        self._begun = dict.fromkeys(stages, 0)
        layers = [m for stage in stages for m in stage.modules() if isinstance(m, MoMa)]
        self._layer = layers[0] if layers else None
        names = self._layer.groups if self._layer is not None else ()
        self._weights = {n: torch.full((), math.nan, device=meshes.device) for n in names}
        for stage in stages if layers else ():
            stage.register_forward_pre_hook(self._enter)
        if meshes.cp.size > 1:
            set_row_group(model, meshes.cp.group)

    def begin(self, step: int, loader: Loader) -> None:
        """Step `step` begins, counted from 1: this reader runs its part of the micro-batches."""
        each, more = divmod(loader.global_batch // loader.micro_batch, loader.world_size)
        reader = self._meshes.batch_rank
        self._step, self._first = step, reader * each + min(reader, more)
        self._begun = dict.fromkeys(self._begun, 0)

    def count_tokens(self, batch: Batch) -> tuple[int, ...]:
        """This rank's summands: tokens of documents, where there are MoE layers, then those of each group of MoMa.

        One of the ranks that read the same rows counts them.
        """
        once = int(self._meshes.is_batch_leader)
        found = [int((batch.document_ids >= 0).sum())] if self._moe.routes else []
        if self._layer is not None:
            found += self._layer.count_tokens(batch.tokens, batch.document_ids).values()
        return tuple(once * number for number in found)

    def set_tokens(self, sums: Sequence[int]) -> None:
        """Set the tokens of the step, in the order of `count_tokens`. No host sync."""
        if self._moe.routes:
            self._moe.set_tokens(sums[0])
        for weight, number in zip(self._weights.values(), sums[int(self._moe.routes) :]):
            weight.data.fill_(1.0 / max(number, 1))  # .data: the forward before keeps the tensor

    def _enter(self, stage: nn.Module, args: Any) -> None:
        if not stage.training:
            return
        set_routing_step(
            stage,
            seed=self._seed,
            step=self._step,
            micro_batch=self._first + self._begun[stage],
            token_weights=self._weights,
        )
        self._begun[stage] += 1
