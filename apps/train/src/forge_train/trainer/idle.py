"""The optimizer of a rank that has nothing to train."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class IdleOptimizer:
    """Stands for an optimizer where a rank of a pipeline holds nothing but frozen parameters. It has no state."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = []

    def step(self, *, skip: Tensor | None = None) -> None:
        pass

    def zero_grad(self) -> None:
        pass

    def set_lr(self, lr: float) -> None:
        pass


def trains_nothing(model: nn.Module) -> bool:
    """Whether all parameters here are frozen."""
    return not any(parameter.requires_grad for parameter in model.parameters())
