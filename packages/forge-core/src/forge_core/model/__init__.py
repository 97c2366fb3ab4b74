"""The dense decoder-only transformer and its parts."""

from forge_core.model.attention import Attention
from forge_core.model.block import Block, PostNormBlock, SandwichBlock
from forge_core.model.config import (
    BLOCK_NAMES,
    GATED,
    UNGATED,
    RopeScaling,
    TransformerConfig,
)
from forge_core.model.context import TokenContext, TokenMask, default_positions
from forge_core.model.documents import SegmentPlan, attend_segments
from forge_core.model.feed_forward import FeedForward, build_feed_forward
from forge_core.model.init import Init, check_init_tables, initialise, reset_by_table
from forge_core.model.kv_cache import KVCache
from forge_core.model.layer_types import LayerType
from forge_core.model.mla import LatentAttention
from forge_core.model.mla_config import MLAConfig
from forge_core.model.mrope import MRopeConfig
from forge_core.model.mtp_config import MTPConfig
from forge_core.model.mup import MuPConfig
from forge_core.model.norm import PlusOneRMSNorm, RMSNorm
from forge_core.model.parts import build_block, build_mixer, check_parts
from forge_core.model.points import WithPoints
from forge_core.model.rows import attend_masked
from forge_core.model.spec import AttentionSpec
from forge_core.model.transformer import Transformer

__all__ = [
    "BLOCK_NAMES",
    "GATED",
    "UNGATED",
    "Attention",
    "AttentionSpec",
    "Block",
    "FeedForward",
    "Init",
    "KVCache",
    "LatentAttention",
    "LayerType",
    "MLAConfig",
    "MRopeConfig",
    "MTPConfig",
    "MuPConfig",
    "PlusOneRMSNorm",
    "PostNormBlock",
    "RMSNorm",
    "RopeScaling",
    "SandwichBlock",
    "SegmentPlan",
    "TokenContext",
    "TokenMask",
    "Transformer",
    "TransformerConfig",
    "WithPoints",
    "attend_masked",
    "attend_segments",
    "build_block",
    "build_feed_forward",
    "build_mixer",
    "check_init_tables",
    "check_parts",
    "default_positions",
    "initialise",
    "reset_by_table",
]
