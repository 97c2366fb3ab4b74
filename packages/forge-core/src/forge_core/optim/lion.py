"""Lion: the sign of an interpolation between gradient and momentum, one moment per parameter."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from forge_core.optim.base import Group, NamedOptimizer, Slots, count_step, rounds
from forge_core.optim.config import OptimizerConfig
from forge_core.optim.local import gradient_shard, pieces, shard


class Lion(NamedOptimizer):
    """EvoLved Sign Momentum (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms").

    `optimizer = Lion(model, OptimizerConfig("lion", lr=1e-4, weight_decay=1.0))`

    With gradient g, momentum m and betas (b1, b2), by default (0.9, 0.99):

        p <- p - lr (sign(b1 m + (1 - b1) g) + weight_decay p);   m <- b2 m + (1 - b2) g

    An update has the same size in every element, so rates are about a tenth of AdamW's, and
    weight_decay ten times its. There is no eps. Groups, named state, the mask and what is refused: see
    `NamedOptimizer`.

    Cost: 4 bytes of momentum per trainable parameter (2 in bf16), made here; no communication, as every shard is
    updated by itself; no host sync in `step`, and beyond that on a GPU 192 MiB at most within it.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig) -> None:
        super().__init__(model, config, betas=config.resolved_betas)

    rounds_state = rounds_weights = True

    def slots(self, group: Group) -> Slots:
        return Slots(("exp_avg",), ("step",) if rounds(group) else ())

    def update(self, group: Group, parameters: list[Tensor], skip: Tensor | None) -> None:
        own = [
            (shard(p), gradient_shard(p), shard(self.state_of(p, group)["exp_avg"]))
            for p in parameters
        ]
        beta1, beta2 = group["betas"]
        lr, decay = group["lr"], 1 - group["lr"] * group["weight_decay"]
        if (
            skip is not None
        ):  # a rate and a factor of 0 and 1 where nothing may change, read on the device
            masked = skip != 0
            rate, decay = torch.where(masked, 0.0, -lr), torch.where(masked, 1.0, decay)
        columns = self._widened(parameters, group) if rounds(group) else pieces(own)
        for weights, gradients, momenta in columns:
            if skip is not None:  # the momentum, mixed with itself, stays as it is
                gradients = [torch.where(masked, m, g) for m, g in zip(momenta, gradients)]
            signs = torch._foreach_lerp(momenta, gradients, 1 - beta1)
            torch._foreach_sign_(signs)
            torch._foreach_mul_(weights, decay)
            if skip is None:
                torch._foreach_add_(weights, signs, alpha=-lr)
            else:
                for weight, sign in zip(weights, signs):
                    weight.addcmul_(sign, rate)
            torch._foreach_lerp_(momenta, gradients, 1 - beta2)
        for parameter in parameters if rounds(group) else ():
            count_step(self.state_of(parameter, group), skip)

    def _widened(
        self, parameters: list[Tensor], group: Group
    ) -> Iterator[tuple[list[Tensor], list[Tensor], list[Tensor]]]:
        """Columns as of `pieces`, where something is stored in bf16."""
        for parameter in parameters:
            kept = [shard(parameter), shard(self.state_of(parameter, group)["exp_avg"])]
            gradients = [gradient_shard(parameter)]
            for weight, momentum, gradient in self.widened(parameter, group, kept, gradients):
                yield [weight], [gradient.float()], [momentum]


def build_lion(model: nn.Module, config: OptimizerConfig) -> Lion:
    """The builder behind the name `lion`."""
    return Lion(model, config)
