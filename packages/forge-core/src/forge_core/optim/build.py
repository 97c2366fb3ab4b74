"""Optimizers by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from forge_core.optim.adamw import build_adamw
from forge_core.optim.config import OptimizerConfig
from forge_core.optim.registry import find


def build_optimizer(model: nn.Module, config: OptimizerConfig | None = None) -> Any:
    """Return the optimizer `config.name` over the trainable parameters of `model` (default: AdamW).

    `optimizer = build_optimizer(model, OptimizerConfig(lr=1e-3))`

    What comes back has `step()` (or `step(skip)`, see `AdamW.step`), `zero_grad()`, `set_lr(float)`, `lr`, `load_state_dict(state)` and
    `state_dict() -> {parameter name: {slot: tensor or float}}` that is complete before the first step;
    see `AdamW`. An optimizer from elsewhere is a callable `builder(model, config)` with such a result.

    Raises: ValueError for an unknown name, and what the optimizer itself refuses.
    """
    config = OptimizerConfig() if config is None else config
    return find(config.name, OPTIMIZERS, "forge.optimizers")(model, config)


OPTIMIZERS: dict[str, Callable[[nn.Module, OptimizerConfig], Any]] = {"adamw": build_adamw}
