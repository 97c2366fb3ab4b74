"""AdamW: torch's fused kernel in fp32, decay on matrices only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from forge_core._shared.shards import local_tensor
from forge_core.optim.base import (
    Group,
    NamedOptimizer,
    Slots,
    count_steps,
    is_rounded,
    local_gradient,
)
from forge_core.optim.config import OptimizerConfig
from forge_core.optim.rounding import list_in_fp32, lists_in_fp32

_FUSED_ON = ("cpu", "cuda")
_SLOTS = Slots(("exp_avg", "exp_avg_sq"), ("step",))


class AdamW(NamedOptimizer):
    """AdamW (Loshchilov and Hutter 2017, algorithm 2) over the trainable parameters of a model.

    `optimizer = AdamW(model, OptimizerConfig(lr=1e-3)); loss.backward(); optimizer.step()`

    With gradient g, moments m and v, betas (b1, b2), step t and rate lr, as torch.optim.AdamW:

        m <- b1 m + (1 - b1) g;   v <- b2 v + (1 - b2) g^2
        p <- p - lr weight_decay p - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

    Moments are sharded like their parameter; each parameter counts its own steps. Groups, named state, the mask and
    errors: see `NamedOptimizer`. Without the fused kernel (devices but CPU and CUDA) a mask costs one host sync.

    Cost: 8 bytes of moments per trainable parameter (4 in bf16), allocated here; no host sync in `step`. What is stored
    in bf16 goes through the fused kernel in lists of fp32 pieces (see `rounding.lists_in_fp32`).
    """

    rounds_state = rounds_weights = True

    def __init__(
        self,
        model: nn.Module,
        config: OptimizerConfig,
        groups: list[dict[str, Any]] | None = None,
    ) -> None:
        trainable = (p for p in model.parameters() if p.requires_grad)
        fused = all(parameter.device.type in _FUSED_ON for parameter in trainable)
        super().__init__(
            model, config, groups, betas=config.resolved_betas, eps=config.eps, fused=fused
        )

    @property
    def masks_on_device(self) -> bool:
        return bool(self.param_groups[0]["fused"])

    def slots(self, group: Group) -> Slots:
        return _SLOTS

    def fresh(self, parameter: Tensor, group: Group) -> dict[str, Tensor]:
        made = super().fresh(parameter, group)
        if "step" in made and not group["fused"]:  # torch's update then counts on the CPU
            made["step"] = made["step"].cpu()
        return made

    def update(self, group: Group, parameters: list[Tensor], skip: Tensor | None) -> None:
        states = [self.state_of(parameter, group) for parameter in parameters]

        # fp32: one launch for all parameters
        if not is_rounded(group):
            gradients = [p.grad for p in parameters if p.grad is not None]
            _update(group, parameters, gradients, states, skip)
            return

        # bf16: in lists of fp32 pieces that are rounded stochastically
        rounded = []
        for parameter, state in zip(parameters, states):
            stored = [local_tensor(t) for t in (parameter, state["exp_avg"], state["exp_avg_sq"])]
            gradient = [local_gradient(parameter)]
            rounded.append(self.rounded(parameter, group, stored, gradient))
        steps = [state["step"] for state in states]
        for numbers, (weights, *moments, gradients) in lists_in_fp32(rounded):
            # the kernel counts in place: each piece starts from the same step
            before = torch._foreach_add([steps[number] for number in numbers], 0)
            own = [dict(zip((*_SLOTS.tensors, "step"), of)) for of in zip(*moments, before)]
            _update(group, weights, list_in_fp32(gradients), own, skip)
        count_steps(states, skip)


def _update(
    group: Group,
    parameters: list[Tensor],
    gradients: list[Tensor],
    states: list[dict[str, Tensor]],
    skip: Tensor | None,
) -> None:
    """Update by AdamW with the betas, eps, lr, weight_decay and fused of a group; `skip` needs fused."""
    beta1, beta2 = group["betas"]
    adamw(
        parameters,
        gradients,
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        [state["step"] for state in states],
        fused=group["fused"] or None,
        found_inf=skip,  # made for loss scaling: 1.0 leaves all as it is, the step counts included
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
