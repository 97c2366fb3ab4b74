"""AdamW: torch's fused kernel in fp32, decay on matrices only."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from forge_core._renamed import config_form
from forge_core._shared.shards import local_tensor
from forge_core.optim.base import (
    Group,
    NamedOptimizer,
    Params,
    Slots,
    as_groups,
    count_steps,
    is_rounded,
    local_gradient,
    tensors_of,
)
from forge_core.optim.rounding import list_in_fp32, lists_in_fp32

_FUSED_ON = ("cpu", "cuda")
_SLOTS = Slots(("exp_avg", "exp_avg_sq"), ("step",))


class AdamW(NamedOptimizer):
    """AdamW (Loshchilov and Hutter 2017, algorithm 2), with the arguments and values of torch.optim.AdamW.

        optimizer = AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)        # all parameters decay
        optimizer = AdamW(param_groups(model, weight_decay=0.1), lr=1e-3)       # matrices and embeddings decay
        loss.backward(); optimizer.step()

    With gradient g, moments m and v, betas (b1, b2), step t and rate lr, as torch.optim.AdamW:

        m <- b1 m + (1 - b1) g;   v <- b2 v + (1 - b2) g^2
        p <- p - lr weight_decay p - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

    Args:
        params: parameters, (name, parameter) pairs or groups. Names are needed by `named_state`.
        state_dtype: "bf16" stores the moments in bf16, rounded stochastically.
        fused, foreach: torch's implementations (default: fused where all parameters are on a CPU or on CUDA, and foreach
            is not True).

    Moments are sharded like their parameter; each parameter counts its own steps. Groups, named state, the mask and
    errors: see `NamedOptimizer`. Without the fused kernel a mask costs one host sync.

    Cost: 8 bytes of moments per parameter with a gradient (4 in bf16); no host sync in `step`. What is stored in bf16
    goes through the fused kernel in lists of fp32 pieces (see `rounding.lists_in_fp32`).
    """

    rounds_state = rounds_weights = True

    @config_form
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        state_dtype: Literal["fp32", "bf16"] = "fp32",
        fused: bool | None = None,
        foreach: bool | None = None,
    ) -> None:
        groups = as_groups(params)
        if fused is None:
            fused = not foreach and can_fuse(groups)
        own: dict[str, Any] = {"betas": betas, "eps": eps, "fused": fused}
        if foreach is not None:  # else state keeps its form
            own["foreach"] = foreach
        super().__init__(groups, lr, weight_decay, state_dtype=state_dtype, **own)

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


def can_fuse(groups: list[dict[str, Any]]) -> bool:
    """Whether torch's fused kernel exists on the devices of all trainable parameters."""
    return all(t.device.type in _FUSED_ON for t in tensors_of(groups) if t.requires_grad)


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
        foreach=group.get("foreach"),
        found_inf=skip,  # made for loss scaling: 1.0 leaves all as it is, the step counts included
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
