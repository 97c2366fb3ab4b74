"""How a decoder sees images: blocks and feed-forwards of the fusions, by name."""

from forge_vlm.fusion.config import (
    PARTING,
    MixtureOfTransformersConfig,
    MoMaConfig,
    axes_problems,
    groups_of,
)
from forge_vlm.fusion.cross_attention import CrossAttention, CrossAttentionBlock
from forge_vlm.fusion.cross_config import CrossAttentionConfig
from forge_vlm.fusion.mixture_of_transformers import MixtureBlock
from forge_vlm.fusion.moma import MoMa, set_routing_step, set_row_group
from forge_vlm.fusion.steps import MoMaSteps

__all__ = [
    "PARTING",
    "CrossAttention",
    "CrossAttentionBlock",
    "CrossAttentionConfig",
    "MixtureBlock",
    "MixtureOfTransformersConfig",
    "MoMa",
    "MoMaConfig",
    "MoMaSteps",
    "axes_problems",
    "groups_of",
    "set_routing_step",
    "set_row_group",
]
