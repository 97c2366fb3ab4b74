"""The optimizer of a rank that has nothing to train."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class IdleOptimizer:
    """The optimizer of a model whose parameters are all frozen, such as a pipeline stage. It has no state."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = []

    def step(self, *, skip: Tensor | None = None) -> None:
        """Does nothing."""

    def zero_grad(self) -> None:
        """Does nothing."""

    def set_lr(self, lr: float) -> None:
        """Does nothing."""


def trains_nothing(model: nn.Module) -> bool:
    """Whether all parameters of `model` are frozen."""
    return not any(parameter.requires_grad for parameter in model.parameters())
