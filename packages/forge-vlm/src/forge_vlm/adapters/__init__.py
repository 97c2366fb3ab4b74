"""From an encoder's features to the width of the decoder's stream, as they are or as fewer tokens."""

from forge_vlm.adapters.build import build_adapter, check_adapter
from forge_vlm.adapters.config import (
    AdapterConfig,
    AttentionalPoolConfig,
    AveragePoolConfig,
    MLPConfig,
    PixelShuffleConfig,
    PixelShuffleMLPConfig,
    ResamplerConfig,
)

__all__ = [
    "AdapterConfig",
    "AttentionalPoolConfig",
    "AveragePoolConfig",
    "MLPConfig",
    "PixelShuffleConfig",
    "PixelShuffleMLPConfig",
    "ResamplerConfig",
    "build_adapter",
    "check_adapter",
]
