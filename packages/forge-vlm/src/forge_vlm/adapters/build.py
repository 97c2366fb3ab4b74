"""Adapters by the name in a config."""

from __future__ import annotations

from torch import nn

from forge_core.registry import Registry
from forge_vlm.adapters.config import AdapterConfig
from forge_vlm.adapters.resampler import Resampler
from forge_vlm.adapters.single import MLP, Linear, Unchanged
from forge_vlm.adapters.windows import AttentionalPool, AveragePool, PixelShuffle, PixelShuffleMLP

__all__ = ["ADAPTERS", "build_adapter", "check_adapter"]

ADAPTERS = Registry(
    "model.adapter.name",
    "forge.adapters",
    ("config", "width", "dim"),
    {
        "none": Unchanged,
        "linear": Linear,
        "mlp": MLP,
        "pixel_shuffle": PixelShuffle,
        "pixel_shuffle_mlp": PixelShuffleMLP,
        "average_pool": AveragePool,
        "attentional_pool": AttentionalPool,
        "resampler": Resampler,
    },
)


def build_adapter(config: AdapterConfig, width: int, dim: int) -> nn.Module:
    """A module Features -> (N, T', D), of features of `width`, whose `tokens(rows, columns)` is T'.

    ValueError for a name that leads nowhere, and for sizes that do not fit.
    """
    build = ADAPTERS.checked(config.name, config.options)
    adapter: nn.Module = build(config, width, dim, **config.options)
    return adapter


def check_adapter(config: AdapterConfig) -> None:
    """Raise what `build_adapter` would for the name and the options; nothing is built."""
    ADAPTERS.checked(config.name, config.options)
