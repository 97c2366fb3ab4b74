"""Adapters that take each token by itself.

Shapes: N images, T tokens of an image, W width of a feature, D width of the stream.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from forge_vlm._shared.problems import invalid
from forge_vlm.adapters.config import AdapterConfig
from forge_vlm.vision.features import Features

__all__ = ["MLP", "Linear", "Unchanged"]


class Unchanged(nn.Module):
    """For encoders whose features have the stream's width."""

    def __init__(self, config: AdapterConfig, width: int, dim: int) -> None:
        super().__init__()
        if width != dim:
            rule = f"must have features of the stream's width {dim}, and the encoder's have {width}"
            raise invalid("adapter.name", "width", "none", rule, "use linear or mlp")

    def forward(self, features: Features) -> Tensor:
        """(N, T, D) -> (N, T, D)."""
        return features.tokens

    def tokens(self, rows: int, columns: int) -> int:
        """How many tokens an image of rows * columns patches becomes; a class token in front is one more."""
        return rows * columns


class Linear(nn.Linear):
    """One linear layer: T tokens stay T."""

    def __init__(self, config: AdapterConfig, width: int, dim: int) -> None:
        super().__init__(width, dim)

    def forward(self, features: Features) -> Tensor:  # type: ignore[override]
        """(N, T, W) -> (N, T, D)."""
        return super().forward(features.tokens)

    def tokens(self, rows: int, columns: int) -> int:
        """How many tokens an image of rows * columns patches becomes; a class token in front is one more."""
        return rows * columns


class MLP(nn.Module):
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

    def tokens(self, rows: int, columns: int) -> int:
        """How many tokens an image of rows * columns patches becomes; a class token in front is one more."""
        return rows * columns
