"""Parameters by name and the learning rate of any torch optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from forge_core._shared.problems import invalid


def trainable(model: nn.Module, *, rounds: bool = False) -> dict[str, nn.Parameter]:
    """Parameters to train by name; a tied one counts once, under its first name.

    Raises ValueError if there is none, and for one that is neither fp32 nor, where the optimizer `rounds` its
    updates stochastically, bf16.
    """
    allowed = (torch.float32, *([torch.bfloat16] if rounds else []))
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        rule = "is that of every parameter, so there is none to train"
        raise invalid("requires_grad", "frozen", False, rule, "leave it True on some")
    for name, parameter in parameters.items():
        if parameter.dtype not in allowed:
            rule = "must be fp32, as a plain update in another dtype loses small steps"
            fix = "keep the model in fp32 and let the forward compute in bf16, or train weights in bf16 with adamw, lion or muon, which round updates stochastically"
            raise invalid(name, "dtype", parameter.dtype, rule, fix, where="parameter")
    return parameters


def named_parameters(optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """Parameters of an optimizer whose groups have names (torch's `param_names`)."""
    groups = optimizer.param_groups
    return {n: p for group in groups for n, p in zip(group["param_names"], group["params"])}


def set_lr(optimizer: Any, lr: float) -> None:
    """Set the learning rate of the next step, in each group.

    A group with an "lr_multiplier" or an "lr_scale" (timm's name) gets `lr` times both. An optimizer that
    has its own method `set_lr` gets `lr` through that.
    """
    own = getattr(optimizer, "set_lr", None)
    if own is not None:
        own(lr)
    else:
        set_group_lrs(optimizer, lr)


def set_group_lrs(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """`set_lr` of a torch optimizer; a rate that is a tensor is filled."""
    for group in optimizer.param_groups:
        rate = lr * group.get("lr_multiplier", 1.0) * group.get("lr_scale", 1.0)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
