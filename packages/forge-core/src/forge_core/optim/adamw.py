"""AdamW: torch's fused kernel, fp32 masters, decay on matrices only."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim.adamw import adamw

from forge_core.optim.base import Group, NamedOptimizer, Slots
from forge_core.optim.config import OptimizerConfig
from forge_core.optim.groups import parameter_groups

_FUSED_ON = ("cpu", "cuda")


class AdamW(NamedOptimizer):
    """Decoupled weight decay (Loshchilov and Hutter 2017) over the trainable parameters of a model.

    `optimizer = AdamW(model, OptimizerConfig(lr=1e-3)); loss.backward(); optimizer.step()`

    Moments are fp32 and sharded like their parameter; each parameter counts its own steps. Groups, named
    state, the mask and what is refused: see `NamedOptimizer`. Without the fused kernel (devices but CPU
    and CUDA) a mask costs one host sync.

    Cost: 8 bytes of moments per trainable parameter, made here; no host sync in `step`.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimizerConfig,
        groups: list[dict[str, Any]] | None = None,
    ) -> None:
        groups = parameter_groups(model, config) if groups is None else groups
        fused = can_fuse(groups)
        super().__init__(
            model, config, groups, betas=config.resolved_betas, eps=config.eps, fused=fused
        )

    @property
    def masks(self) -> bool:
        return bool(self.param_groups[0]["fused"])

    def slots(self, group: Group) -> Slots:
        return ADAMW_SLOTS

    def fresh(self, parameter: Tensor, group: Group) -> dict[str, Tensor]:
        made = super().fresh(parameter, group)
        if "step" in made and not group["fused"]:  # then torch's update counts on the CPU
            made["step"] = made["step"].cpu()
        return made

    def update(self, group: Group, parameters: list[Tensor], skip: Tensor | None) -> None:
        states = [self.state_of(parameter, group) for parameter in parameters]
        update_adamw(group, parameters, states, skip)


#: Slots that `update_adamw` reads and writes.
ADAMW_SLOTS = Slots(("exp_avg", "exp_avg_sq"), ("step",))


def can_fuse(groups: list[dict[str, Any]]) -> bool:
    """Whether torch's fused kernel takes all parameters of groups of (name, parameter)."""
    return all(p.device.type in _FUSED_ON for group in groups for _, p in group["params"])


def update_adamw(
    group: Group, parameters: list[Tensor], states: list[dict[str, Tensor]], skip: Tensor | None
) -> None:
    """AdamW's update with the betas, eps, lr, weight_decay and fused of a group; `skip` needs fused."""
    beta1, beta2 = group["betas"]
    adamw(
        parameters,
        [p.grad for p in parameters if p.grad is not None],
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        [state["step"] for state in states],
        fused=group["fused"] or None,
        found_inf=skip,  # torch's name for it, made for loss scaling
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def build_adamw(model: nn.Module, config: OptimizerConfig) -> AdamW:
    """The builder behind the name `adamw`."""
    return AdamW(model, config)
