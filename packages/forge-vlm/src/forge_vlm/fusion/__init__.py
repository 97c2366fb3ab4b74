"""How a decoder sees images: blocks and feed-forwards of the fusions, by name."""

from forge_vlm._renamed import renamed
from forge_vlm.fusion.config import (
    PARTING,
    CrossAttentionConfig,
    MixtureOfTransformersConfig,
    MoMaConfig,
    axes_problems,
    groups_of,
)
from forge_vlm.fusion.cross_attention import CrossAttention, CrossAttentionBlock

__all__ = [
    "PARTING",
    "CrossAttention",
    "CrossAttentionBlock",
    "CrossAttentionConfig",
    "MixtureOfTransformersConfig",
    "MoMaConfig",
    "axes_problems",
    "groups_of",
]

__getattr__ = renamed(__name__)
