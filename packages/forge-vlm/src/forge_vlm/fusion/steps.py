"""MoMa in training steps: the tokens that the losses of its routers are means over, and the numbers of micro-batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from forge_vlm.fusion.moma import MoMa, set_routing_step

__all__ = ["MoMaSteps"]


class MoMaSteps:
    """Weights the losses of the routers of MoMa by tokens, and numbers the micro-batches for their noise.

        steps = MoMaSteps([model], seed=0)
        steps.begin(step=7, first=0)                              # before the forwards of a step
        counts = steps.count_tokens(tokens, document_ids)         # to be added up over micro-batches and ranks
        steps.set_tokens(counts)                                  # before the first backward

    Each token of the step has the same weight then, whatever its micro-batch. Each of `stages` (of a pipeline, or the
    model) runs all micro-batches of its data rank in their order. Forwards in eval mode, which draw nothing, do not
    count. Without such layers nothing happens.
    """

    def __init__(self, stages: Sequence[nn.Module], seed: int, device: Any = None) -> None:
        self._seed, self._step, self._first = seed, 0, 0
        self._begun = dict.fromkeys(stages, 0)
        layers = [m for stage in stages for m in stage.modules() if isinstance(m, MoMa)]
        self._layer = layers[0] if layers else None
        names = () if self._layer is None else self._layer.groups
        self._weights = {name: torch.full((), math.nan, device=device) for name in names}
        for stage in stages if layers else ():
            stage.register_forward_pre_hook(self._enter)

    def begin(self, step: int, first: int) -> None:
        """Step `step` begins; `first` is the number of this data rank's first micro-batch in the global batch."""
        self._step, self._first = step, first
        self._begun = dict.fromkeys(self._begun, 0)

    def count_tokens(self, tokens: Tensor, document_ids: Tensor) -> tuple[int, ...]:
        """Tokens of each group in (B, S)."""
        if self._layer is None:
            return ()
        return tuple(self._layer.count_tokens(tokens, document_ids).values())

    def set_tokens(self, sums: Sequence[int]) -> None:
        """Set the tokens of the step, in the order of `count_tokens`. No host sync."""
        for weight, number in zip(self._weights.values(), sums):
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
