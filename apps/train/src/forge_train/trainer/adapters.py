"""Adapters in the model of a run, which freeze all other weights."""

from __future__ import annotations

import torch
from torch import nn

from forge_core.lora import adapter_names, lora
from forge_core.optim import match_groups
from forge_train.config.schema import JobConfig
from forge_train.errors import config_errors

_DTYPES = {"bf16": torch.bfloat16, "fp32": None}


def add_adapters(model: nn.Module, config: JobConfig) -> None:
    """Freeze a whole model and give it the adapters of [lora], in place; nothing without any. ConfigError."""
    adapters = config.lora.adapters
    if adapters is None:
        return
    with config_errors():
        lora(model, adapters, _DTYPES[config.lora.base_dtype])
        _refuse_frozen_groups(model, config)


def _refuse_frozen_groups(model: nn.Module, config: JobConfig) -> None:
    """ValueError for a group without an adapter: its rate would change nothing."""
    trained = set(adapter_names(model))
    owners = match_groups(model, config.optimizer.groups)
    idle = set(config.optimizer.groups) - {owners.get(name) for name in trained}
    if idle:
        raise ValueError(
            "\n".join(
                f"optimizer.groups.{group}.patterns match weights that lora.rank {config.lora.rank} freezes, and no "
                "adapter; use a pattern as '*.lora_b', or remove the group"
                for group in sorted(idle)
            )
        )


def frozen_names(model: nn.Module) -> set[str]:
    """Names of the parameters that are no adapter's, all of a tied one."""
    adapters = set(adapter_names(model))
    return {n for n, _ in model.named_parameters(remove_duplicate=False)} - adapters
