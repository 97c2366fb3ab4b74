"""Fusions whose routers draw noise, or add a loss to each micro-batch, are told which one comes next."""

from __future__ import annotations

from typing import Any

from torch import nn

from forge_parallel import Meshes
from forge_parallel.micro_batches import MicroBatches
from forge_parallel.structure import stages_of
from forge_vlm.fusion import MoMa, set_routing_step, set_row_group


class RoutingSteps:
    """Numbers the micro-batches of a global batch for the MoMa layers of a model; does nothing without any.

    `begin` comes before the forwards of a step. Each stage of a pipeline runs all micro-batches of its reader in their
    order. Evaluations, in which nothing is drawn, do not count.
    """

    def __init__(self, model: nn.Module, seed: int, meshes: Meshes) -> None:
        self._seed, self._reader = seed, meshes.batch_rank
        self._step, self._first, self._share = 0, 0, 1.0
        stages = stages_of(model)
        self._begun = dict.fromkeys(stages, 0)
        for stage in stages:
            if any(isinstance(module, MoMa) for module in stage.modules()):
                stage.register_forward_pre_hook(self._enter)
        if meshes.cp.size > 1:
            set_row_group(model, meshes.cp.group)

    def begin(self, step: int, division: MicroBatches) -> None:
        """Step `step` begins, counted from 1: this reader runs its part of the micro-batches."""
        each, more = divmod(division.global_batch // division.size, division.readers)
        self._step, self._first = step, self._reader * each + min(self._reader, more)
        self._share = division.size / division.global_batch
        self._begun = dict.fromkeys(self._begun, 0)

    def _enter(self, stage: nn.Module, args: Any) -> None:
        if not stage.training:
            return
        set_routing_step(
            stage,
            seed=self._seed,
            step=self._step,
            micro_batch=self._first + self._begun[stage],
            share=self._share,
        )
        self._begun[stage] += 1
