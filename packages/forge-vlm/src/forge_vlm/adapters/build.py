"""Adapters by the name in a config, with those that keep the number of tokens.

Shapes: N images, T tokens of an image, W width of a feature, D width of the stream.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from forge_core.registry import Registry
from forge_vlm._shared.problems import invalid
from forge_vlm.adapters.config import AdapterConfig
from forge_vlm.adapters.pooling import (
    AttentionalPool,
    AveragePool,
    PixelShuffle,
    PixelShuffleMLP,
    Resampler,
)
from forge_vlm.vision.features import Features

__all__ = ["ADAPTERS", "MLP", "Linear", "Unchanged", "build_adapter", "check_adapter"]


class _SameTokens:
    """Base of adapters that keep the number of tokens."""

    def tokens(self, rows: int, columns: int) -> int:
        """How many tokens an image of rows * columns patches becomes; a class token in front is one more."""
        return rows * columns


class Unchanged(_SameTokens, nn.Module):
    """For encoders whose features have the stream's width."""

    def __init__(self, config: AdapterConfig, width: int, dim: int) -> None:
        super().__init__()
        if width != dim:
            rule = f"must have features of the stream's width {dim}, and the encoder's have {width}"
            raise invalid("adapter.name", "width", "none", rule, "use linear or mlp")

    def forward(self, features: Features) -> Tensor:
        """(N, T, D) -> (N, T, D)."""
        return features.tokens


class Linear(_SameTokens, nn.Linear):
    """One linear layer: T tokens stay T."""

    def __init__(self, config: AdapterConfig, width: int, dim: int) -> None:
        super().__init__(width, dim)

    def forward(self, features: Features) -> Tensor:  # type: ignore[override]
        """(N, T, W) -> (N, T, D)."""
        return super().forward(features.tokens)


class MLP(_SameTokens, nn.Module):
    """Two linear layers around a GELU: T tokens stay T."""

    def __init__(self, config: AdapterConfig, width: int, dim: int) -> None:
        super().__init__()
        hidden, bias = config.mlp.hidden_dim or dim, config.mlp.bias
        self.linear_1 = nn.Linear(width, hidden, bias=bias)
        self.linear_2 = nn.Linear(hidden, dim, bias=bias)

    def forward(self, features: Features) -> Tensor:
        """(N, T, W) -> (N, T, D)."""
        out: Tensor = self.linear_2(F.gelu(self.linear_1(features.tokens)))
        return out


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
