"""Configuration of adapters, validated when made."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from forge_vlm._config import foreign_table, size_problems
from forge_vlm._shared.problems import Problem, raise_problems

__all__ = [
    "AdapterConfig",
    "AttentionalPoolConfig",
    "AveragePoolConfig",
    "MLPConfig",
    "PixelShuffleConfig",
    "PixelShuffleMLPConfig",
    "ResamplerConfig",
]

_SIZES = {"num_heads": 2**10, "num_layers": 2**10, "num_latents": 2**16, "hidden_dim": 2**20}


@dataclass(frozen=True)
class MLPConfig:
    """Two linear layers around an activation (LLaVA-1.5)."""

    hidden_dim: int | None = None
    """width between the two layers; empty: that of the stream"""
    bias: bool = True
    """both layers have a bias"""

    def __post_init__(self) -> None:
        raise_problems("mlp", size_problems(self, {"hidden_dim": 2**20}))


@dataclass(frozen=True)
class PixelShuffleConfig:
    """`factor` * `factor` neighbors side by side become one token, then a linear layer (Idefics3)."""

    factor: int = 2
    """rows and columns of tokens that become one"""
    bias: bool = False
    """the layer has a bias"""

    def __post_init__(self) -> None:
        raise_problems("pixel_shuffle", size_problems(self, {"factor": 64}))


@dataclass(frozen=True)
class PixelShuffleMLPConfig:
    """`factor` * `factor` neighbors side by side become one token, then a norm and two linear layers (InternVL)."""

    factor: int = 2
    """rows and columns of tokens that become one"""

    def __post_init__(self) -> None:
        raise_problems("pixel_shuffle_mlp", size_problems(self, {"factor": 64}))


@dataclass(frozen=True)
class AveragePoolConfig:
    """`factor` * `factor` neighbors become their mean, then a linear layer."""

    factor: int = 2
    """rows and columns of tokens that become one"""
    bias: bool = True
    """the layer has a bias"""

    def __post_init__(self) -> None:
        raise_problems("average_pool", size_problems(self, {"factor": 64}))


@dataclass(frozen=True)
class AttentionalPoolConfig:
    """The mean of `factor` * `factor` neighbors asks them by attention (Molmo, arXiv 2409.17146)."""

    factor: int = 2
    """rows and columns of tokens that become one"""
    num_heads: int = 8
    """heads of the attention, which share the width of the features"""

    def __post_init__(self) -> None:
        sizes = {"factor": 64, "num_heads": _SIZES["num_heads"]}
        raise_problems("attentional_pool", size_problems(self, sizes))


@dataclass(frozen=True)
class ResamplerConfig:
    """Trained latents ask the tokens of an image by attention (Perceiver; Flamingo, arXiv 2204.14198)."""

    num_latents: int = 64
    """tokens that an image of any size becomes"""
    num_layers: int = 2
    """blocks of attention and feed-forward"""
    num_heads: int = 8
    """heads of each attention, which share the width of the stream"""
    hidden_dim: int | None = None
    """width inside the feed-forward; empty: 4 times that of the stream"""

    def __post_init__(self) -> None:
        raise_problems("resampler", size_problems(self, _SIZES))


TABLES = {
    "mlp": MLPConfig,
    "pixel_shuffle": PixelShuffleConfig,
    "pixel_shuffle_mlp": PixelShuffleMLPConfig,
    "average_pool": AveragePoolConfig,
    "attentional_pool": AttentionalPoolConfig,
    "resampler": ResamplerConfig,
}
NAMES = ("none", "linear", *TABLES)


@dataclass(frozen=True)
class AdapterConfig:
    """An adapter by name, whose options stand in the table of that name; or an adapter `module:attr`.

    AdapterConfig("attentional_pool", attentional_pool=AttentionalPoolConfig(factor=2, num_heads=4))
    """

    name: str = "mlp"
    """none (the encoder has the stream's width), linear, mlp, pixel_shuffle, pixel_shuffle_mlp, average_pool,
    attentional_pool, resampler, or the import path of an adapter"""
    mlp: MLPConfig = MLPConfig()
    """the adapter mlp"""
    pixel_shuffle: PixelShuffleConfig = PixelShuffleConfig()
    """the adapter pixel_shuffle"""
    pixel_shuffle_mlp: PixelShuffleMLPConfig = PixelShuffleMLPConfig()
    """the adapter pixel_shuffle_mlp"""
    average_pool: AveragePoolConfig = AveragePoolConfig()
    """the adapter average_pool"""
    attentional_pool: AttentionalPoolConfig = AttentionalPoolConfig()
    """the adapter attentional_pool"""
    resampler: ResamplerConfig = ResamplerConfig()
    """the adapter resampler"""
    options: dict[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    """keyword arguments of an adapter by import path"""

    def __post_init__(self) -> None:
        raise_problems("adapter", _problems(self))


def _problems(c: AdapterConfig) -> Iterator[Problem]:
    if c.name not in NAMES and ":" not in c.name:
        rule = f"must be {', '.join(NAMES)} or module:attr"
        yield Problem("name", "unknown", c.name, rule, "use mlp")
    for table in TABLES:
        yield from foreign_table(c, table, table)
    if c.options and ":" not in c.name:
        rule = f"are those of an adapter by import path, and name is {c.name!r}"
        yield Problem("options", "foreign", ..., rule, "remove them")
