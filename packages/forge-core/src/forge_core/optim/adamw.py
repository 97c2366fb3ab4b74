"""AdamW: torch's fused kernel in fp32, decay on matrices only."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim.adamw import adamw

from forge_core.optim.base import Group, NamedOptimizer, Slots, count_step, rounds
from forge_core.optim.config import OptimizerConfig
from forge_core.optim.groups import parameter_groups
from forge_core.optim.local import gradient_shard, shard

_FUSED_ON = ("cpu", "cuda")


class AdamW(NamedOptimizer):
    """Decoupled weight decay (Loshchilov and Hutter 2017) over the trainable parameters of a model.

    `optimizer = AdamW(model, OptimizerConfig(lr=1e-3)); loss.backward(); optimizer.step()`

    Moments are sharded like their parameter; each parameter counts its own steps. Groups, named
    state, the mask and what is refused: see `NamedOptimizer`. Without the fused kernel (devices but CPU
    and CUDA) a mask costs one host sync.

    Cost: 8 bytes of moments per trainable parameter (4 in bf16), made here; no host sync in `step`. What is stored in
    bf16 goes through the fused kernel in fp32 pieces (see `rounding.widened`), one after the other.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimizerConfig,
        groups: list[dict[str, Any]] | None = None,
    ) -> None:
        if groups is None:
            groups = parameter_groups(model, config, rounds=True)
        fused = can_fuse(groups)
        super().__init__(
            model, config, groups, betas=config.resolved_betas, eps=config.eps, fused=fused
        )

    rounds_state = rounds_weights = True

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
        if not rounds(group):
            gradients = [p.grad for p in parameters if p.grad is not None]
            update_adamw(group, parameters, gradients, states, skip)
            return
        for parameter, state in zip(parameters, states):
            kept = [shard(parameter), *(shard(state[name]) for name in ADAMW_SLOTS.tensors)]
            before = state["step"].clone()
            for weight, *moments, gradient in self.widened(
                parameter, group, kept, [gradient_shard(parameter)]
            ):
                own = dict(zip(ADAMW_SLOTS.tensors, moments), step=before.clone())
                update_adamw(group, [weight], [gradient.float()], [own], skip)
            count_step(state, skip)


#: Slots that `update_adamw` reads and writes.
ADAMW_SLOTS = Slots(("exp_avg", "exp_avg_sq"), ("step",))


def can_fuse(groups: list[dict[str, Any]]) -> bool:
    """Whether torch's fused kernel takes all parameters of groups of (name, parameter)."""
    return all(p.device.type in _FUSED_ON for group in groups for _, p in group["params"])


def update_adamw(
    group: Group,
    parameters: list[Tensor],
    gradients: list[Tensor],
    states: list[dict[str, Tensor]],
    skip: Tensor | None,
) -> None:
    """AdamW's update with the betas, eps, lr, weight_decay and fused of a group; `skip` needs fused."""
    beta1, beta2 = group["betas"]
    adamw(
        parameters,
        gradients,
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
