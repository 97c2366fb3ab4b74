"""AdamW with named state: torch's fused kernel, fp32 masters, decay on matrices only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from forge_core.optim.config import OptimizerConfig

_MOMENTS = ("exp_avg", "exp_avg_sq")
_SLOTS = (*_MOMENTS, "step")
_FUSED_ON = ("cpu", "cuda")


class AdamW:
    """Decoupled weight decay (Loshchilov and Hutter 2017) over the trainable parameters of a model.

    `optimizer = AdamW(model, OptimizerConfig(lr=1e-3)); loss.backward(); optimizer.step()`

    Parameters are the fp32 masters; moments are fp32 and of the kind of their parameter, DTensors too.
    Weight decay applies to parameters with two dims or more, embeddings included, not to norms and
    biases. A tied parameter counts once, under its first name; frozen ones (`requires_grad` False when
    this is built) are left out. A parameter without a gradient is not touched by `step`.

    Raises: ValueError without a trainable parameter, for parameters that are not fp32 and for ones that
        are still on the meta device.

    Cost: 8 bytes of moments per trainable parameter, made at its first step; no host sync in `step`.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig) -> None:
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        _check_parameters(self._parameters)
        decayed = [p for p in self._parameters.values() if p.ndim >= 2]
        plain = [p for p in self._parameters.values() if p.ndim < 2]
        groups = [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        self._fused = all(p.device.type in _FUSED_ON for p in self._parameters.values())
        self._optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            fused=self._fused or None,
        )

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return self._optimizer.param_groups[0]["lr"]

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the next step: the peak rate times the schedule's factor."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr

    def step(self, skip: Tensor | None = None) -> None:
        """Update every parameter that has a gradient, in place.

        `skip` (0-dim, 1.0 or 0.0) masks the whole update where it is 1: parameters, moments, decay and
        step counts stay as they are, whatever the gradients hold. The fused kernel reads it on the
        device, so nobody waits; with parameters on another device, or without that kernel (devices but CPU and CUDA) it costs one host sync.
        """
        if skip is not None and not self._fused:
            if float(skip):
                return
            skip = None
        place = next(iter(self._parameters.values())).device
        if skip is not None and skip.device != place:
            skip = skip.to(place)  # torch's own copy would not be waited for
        # torch's name for it, made for loss scaling; None takes it off again
        self._optimizer.found_inf = skip  # type: ignore[attr-defined]
        self._optimizer.step()

    def zero_grad(self) -> None:
        """Forget the gradients (they become None)."""
        self._optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, dict[str, Tensor | float]]:
        """Return `{name: {"exp_avg": tensor, "exp_avg_sq": tensor, "step": float}}` for all parameters.

        The tensors are the optimizer's own, not copies. A parameter that was never updated gets zeros and
        step 0.0 here, which is what its first update starts from, so no update is needed beforehand.
        The learning rate is not part of it: it is a function of the step. One host sync on a GPU.
        """
        slots = {name: self._slots(parameter) for name, parameter in self._parameters.items()}
        first = next(iter(slots.values()))["step"]
        steps = torch.stack([slot["step"].to(first.device) for slot in slots.values()]).tolist()
        return {
            name: {**{m: slot[m] for m in _MOMENTS}, "step": step}
            for (name, slot), step in zip(slots.items(), steps)
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over a state of the same parameters; the next step is then as if never interrupted.

        Values are copied. Raises ValueError, before anything is changed, listing every parameter or slot
        that is missing, extra, of another shape, or a plain tensor where this one holds a DTensor.
        """
        problems = self._differences(state)
        if problems:
            raise ValueError("optimizer state does not fit:\n" + "\n".join(problems))
        for name, parameter in self._parameters.items():
            own = self._slots(parameter)
            with torch.no_grad():
                for moment in _MOMENTS:
                    own[moment].copy_(state[name][moment])
                own["step"].fill_(float(state[name]["step"]))

    def _slots(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Torch's state of one parameter; made here, as its first step would, where there is none yet."""
        slots = self._optimizer.state[parameter]
        if not slots:
            # The fused kernel counts steps on the parameter's device, the others on the CPU.
            device = parameter.device if self._fused else torch.device("cpu")
            slots["step"] = torch.zeros((), dtype=torch.float32, device=device)
            for moment in _MOMENTS:
                slots[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return slots

    def _differences(self, state: Mapping[str, Mapping[str, Any]]) -> list[str]:
        own = self._parameters
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


def build_adamw(model: nn.Module, config: OptimizerConfig) -> AdamW:
    """The builder behind the name `adamw`."""
    return AdamW(model, config)


def _unlike(name: str, parameter: nn.Parameter, value: object) -> list[str]:
    if not isinstance(value, Tensor):
        return [f"{name}: {type(value).__name__}; a moment is a tensor"]
    if value.shape != parameter.shape:
        return [f"{name}: shape {tuple(value.shape)}; the parameter has {tuple(parameter.shape)}"]
    # Duck-typed, so that torch.distributed.tensor is not imported by those who do not use it.
    if hasattr(value, "placements") != hasattr(parameter, "placements"):
        return [
            f"{name}: {type(value).__name__}; load into the tensors that state_dict() gives, "
            "they are distributed like the parameter"
        ]
    return []


def _check_parameters(parameters: Mapping[str, nn.Parameter]) -> None:
    if not parameters:
        raise ValueError("no parameter to train: all are frozen; leave requires_grad True on some")
    for name, parameter in parameters.items():
        if parameter.is_meta:
            raise ValueError(
                f"parameter {name} is on the meta device and has no values; materialise the model first"
            )
        if parameter.dtype != torch.float32:
            raise ValueError(
                f"parameter {name} is {parameter.dtype}: a plain update in it loses small steps, so the "
                "masters must be fp32; keep the model in fp32 and let the forward compute in bf16"
            )
