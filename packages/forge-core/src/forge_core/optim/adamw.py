"""AdamW with named state: torch's fused kernel, fp32 masters, decay on matrices only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from forge_core.optim.config import OptimizerConfig
from forge_core.optim.groups import parameter_groups, take_part
from forge_core.optim.named import named_parameters, set_group_lrs

_MOMENTS = ("exp_avg", "exp_avg_sq")
_SLOTS = (*_MOMENTS, "step")
_FUSED_ON = ("cpu", "cuda")


class AdamW(torch.optim.Optimizer):
    """Decoupled weight decay (Loshchilov and Hutter 2017) over the trainable parameters of a model.

    `optimizer = AdamW(model, OptimizerConfig(lr=1e-3)); loss.backward(); optimizer.step()`

    Parameters are the fp32 masters; moments are fp32 and sharded like their parameter. Weight decay
    applies to parameters with two dims or more, embeddings included, not to norms and biases. A tied
    parameter counts once, under its first name; frozen ones (`requires_grad` False when this is
    built) are left out. A parameter without a gradient is not touched by `step`. Groups of the configuration
    have a learning rate and decay of their own (see `parameter_groups`); `set_multipliers` freezes and
    unfreezes them, and each parameter counts its own steps.

    It is a torch optimizer: `state_dict` and `load_state_dict` have torch's form, and torch's
    schedulers, GradScaler and `torch.distributed.checkpoint` take it. `named_state` and
    `load_named_state` hold the same by parameter name, which fits any layout of ranks.

    Raises: ValueError without a trainable parameter, for parameters that are not fp32 and for ones that
        are still on the meta device.

    Cost: 8 bytes of moments per trainable parameter, made here; no host sync in `step`.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig) -> None:
        groups = parameter_groups(model, config)
        parameters = {n: p for group in groups for n, p in group["params"]}
        for name, parameter in parameters.items():
            if parameter.is_meta:
                raise ValueError(
                    f"parameter {name} is on the meta device and has no values; materialise the model first"
                )
        fused = all(p.device.type in _FUSED_ON for p in parameters.values())
        defaults = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
        super().__init__(groups, {**defaults, "weight_decay": config.weight_decay, "fused": fused})
        for parameter in parameters.values():
            self._slots(parameter)
        take_part(self, model, config)

    @property
    def lr(self) -> float:
        """Learning rate of the next step, of the first group."""
        return float(self.param_groups[0]["lr"])

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the next step, in each group times its "lr_multiplier"."""
        set_group_lrs(self, lr)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, skip: Tensor | None = None) -> Any:
        """Update every parameter that has a gradient, in place.

        `skip` (0-dim, 1.0 or 0.0) masks the whole update where it is 1: parameters, moments, decay and
        step counts stay as they are, whatever the gradients hold. The fused kernel reads it on the
        device, so nothing waits; with parameters on another device, or without that kernel (devices but
        CPU and CUDA) it costs one host sync. Returns what `closure` does, None without one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        first = self.param_groups[0]
        if skip is not None and not first["fused"]:
            if float(skip):
                return loss
            skip = None
        device = first["params"][0].device
        if skip is not None and skip.device != device:
            skip = skip.to(device)  # torch's own copy would not be waited for
        for group in self.param_groups:
            self._update(group, skip)
        return loss

    def _update(self, group: Mapping[str, Any], skip: Tensor | None) -> None:
        parameters: list[Tensor] = [p for p in group["params"] if p.grad is not None]
        if not parameters:  # a frozen group
            return
        slots = [self._slots(parameter) for parameter in parameters]
        beta1, beta2 = group["betas"]
        adamw(
            parameters,
            [p.grad for p in parameters if p.grad is not None],
            [slot["exp_avg"] for slot in slots],
            [slot["exp_avg_sq"] for slot in slots],
            [],
            [slot["step"] for slot in slots],
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

    def named_state(self) -> dict[str, dict[str, Tensor | float]]:
        """Return `{name: {"exp_avg": tensor, "exp_avg_sq": tensor, "step": float}}` for all parameters.

        The tensors are the optimizer's own, not copies. A parameter that was never updated gets zeros and
        step 0.0 here, which is what its first update starts from, so no update is needed beforehand.
        The learning rate is not part of it: it is a function of the step. One host sync on a GPU.
        """
        slots = {name: self._slots(p) for name, p in named_parameters(self).items()}
        first = next(iter(slots.values()))["step"]
        steps = torch.stack([slot["step"].to(first.device) for slot in slots.values()]).tolist()
        return {
            name: {**{m: slot[m] for m in _MOMENTS}, "step": step}
            for (name, slot), step in zip(slots.items(), steps)
        }

    def load_named_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over a named state of the same parameters; the next step is as if never interrupted.

        Values are copied. Raises ValueError, before anything is changed, listing every parameter or slot
        that is missing, extra, of another shape, or a plain tensor where this one holds a DTensor.
        """
        parameters = named_parameters(self)
        problems = _differences(parameters, state)
        if problems:
            raise ValueError("optimizer state does not fit:\n" + "\n".join(problems))
        for name, parameter in parameters.items():
            own = self._slots(parameter)
            with torch.no_grad():
                for moment in _MOMENTS:
                    own[moment].copy_(state[name][moment])
                own["step"].fill_(float(state[name]["step"]))

    def _slots(self, parameter: Tensor) -> dict[str, Tensor]:
        """State of one parameter; made here where a loaded state has none for it."""
        slots: dict[str, Tensor] = self.state[parameter]
        if not slots:
            # The fused kernel counts steps on the parameter's device, the others on the CPU.
            device = parameter.device if self.param_groups[0]["fused"] else torch.device("cpu")
            slots["step"] = torch.zeros((), dtype=torch.float32, device=device)
            for moment in _MOMENTS:
                slots[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return slots


def build_adamw(model: nn.Module, config: OptimizerConfig) -> AdamW:
    """The builder behind the name `adamw`."""
    return AdamW(model, config)


def _differences(
    own: Mapping[str, nn.Parameter], state: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    problems = [f"{name}: missing; the model has it" for name in own if name not in state]
    problems += [
        f"{name}: extra; the model has no such parameter" for name in state if name not in own
    ]
    for name in (name for name in own if name in state):
        slots = state[name]
        problems += [f"{name}.{slot}: missing" for slot in _SLOTS if slot not in slots]
        problems += [f"{name}.{slot}: extra" for slot in slots if slot not in _SLOTS]
        for moment in (m for m in _MOMENTS if m in slots):
            problems += _unlike(f"{name}.{moment}", own[name], slots[moment])
    return problems


def _unlike(name: str, parameter: nn.Parameter, value: object) -> list[str]:
    if not isinstance(value, Tensor):
        return [f"{name}: {type(value).__name__}; a moment is a tensor"]
    if value.shape != parameter.shape:
        return [f"{name}: shape {tuple(value.shape)}; the parameter has {tuple(parameter.shape)}"]
    # Duck-typed, so that torch.distributed.tensor is not imported by those who do not use it.
    if hasattr(value, "placements") != hasattr(parameter, "placements"):
        return [
            f"{name}: {type(value).__name__}; load into the tensors that named_state() gives, "
            "they are distributed like the parameter"
        ]
    return []
