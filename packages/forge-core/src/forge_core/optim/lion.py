"""Lion: the sign of an interpolation between gradient and momentum, one moment per parameter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from forge_core._renamed import config_form
from forge_core._shared.shards import local_tensor
from forge_core.optim.base import (
    Group,
    NamedOptimizer,
    Params,
    Slots,
    count_steps,
    is_rounded,
    local_gradient,
    pieces,
)
from forge_core.optim.rounding import list_in_fp32, lists_in_fp32


class Lion(NamedOptimizer):
    """EvoLved Sign Momentum (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2).

    `optimizer = Lion(param_groups(model, weight_decay=1.0), lr=1e-4)`, or `Lion(model.parameters(), lr=1e-4)`

    With gradient g, momentum m and betas (b1, b2):

        p <- p - lr (sign(b1 m + (1 - b1) g) + weight_decay p);   m <- b2 m + (1 - b2) g

    An update has the same size in every element, so learning rates are about a tenth of AdamW's, and weight_decay ten
    times its value. There is no eps. `state_dtype` "bf16" stores the momentum in bf16, rounded stochastically. Groups, named state, the mask and errors: see `NamedOptimizer`.

    Cost: 4 bytes of momentum per parameter with a gradient (2 in bf16); no communication, as every shard is
    updated by itself; no host sync in `step`, and within it 192 MiB of temporary tensors at most on a GPU.
    """

    rounds_state = rounds_weights = True

    @config_form
    def __init__(
        self,
        params: Params,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        state_dtype: Literal["fp32", "bf16"] = "fp32",
    ) -> None:
        super().__init__(params, lr, weight_decay, state_dtype=state_dtype, betas=betas)

    def slots(self, group: Group) -> Slots:
        return Slots(("exp_avg",), ("step",) if is_rounded(group) else ())

    def update(self, group: Group, parameters: list[Tensor], skip: Tensor | None) -> None:
        beta1, beta2 = group["betas"]
        lr, decay = group["lr"], 1 - group["lr"] * group["weight_decay"]
        if skip is not None:
            # a rate of 0 and a factor of 1 where nothing may change: the host does not wait for the mask
            masked = skip != 0
            rate, decay = torch.where(masked, 0.0, -lr), torch.where(masked, 1.0, decay)

        for weights, gradients, momenta in self._columns(parameters, group):
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

        if is_rounded(group):
            count_steps([self.state_of(parameter, group) for parameter in parameters], skip)

    def _columns(
        self, parameters: list[Tensor], group: Group
    ) -> Iterator[tuple[list[Tensor], ...]]:
        """Pieces of (weights, gradients, momenta); of those that are stored in bf16, in fp32."""
        tensors = [
            (local_tensor(p), local_gradient(p), local_tensor(self.state_of(p, group)["exp_avg"]))
            for p in parameters
        ]
        if not is_rounded(group):
            yield from pieces(tensors)
            return
        rounded = [
            self.rounded(parameter, group, [weights, momenta], [gradients])
            for parameter, (weights, gradients, momenta) in zip(parameters, tensors)
        ]
        for _, (weights, momenta, gradients) in lists_in_fp32(rounded):
            yield weights, list_in_fp32(gradients), momenta
