"""The dense decoder-only transformer and its parts."""

from forge_core._renamed import renamed
from forge_core.model.attention import Attention
from forge_core.model.attention_flex import attend_flex
from forge_core.model.attention_ops import (
    AttentionSpec,
    SegmentPlan,
    attend_masked,
    attend_segments,
)
from forge_core.model.block import (
    BLOCKS,
    Block,
    PostNormBlock,
    SandwichBlock,
    build_block,
    build_mixer,
    check_parts,
)
from forge_core.model.config import LayerType, TransformerConfig
from forge_core.model.context import TokenContext, TokenMask, default_positions
from forge_core.model.feed_forward import GATED, UNGATED, FeedForward, build_feed_forward
from forge_core.model.init import Init, check_init_tables, initialize, reset_by_table
from forge_core.model.kv_cache import KVCache
from forge_core.model.mla import LatentAttention, MLAConfig
from forge_core.model.mtp import MTPConfig
from forge_core.model.mup import MuPConfig
from forge_core.model.norm import PlusOneRMSNorm, RMSNorm
from forge_core.model.points import WithPoints
from forge_core.model.rope import MRopeConfig, RopeScaling
from forge_core.model.transformer import Transformer

BLOCK_NAMES = tuple(BLOCKS.built_in)

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
    "attend_flex",
    "attend_masked",
    "attend_segments",
    "build_block",
    "build_feed_forward",
    "build_mixer",
    "check_init_tables",
    "check_parts",
    "default_positions",
    "initialize",
    "reset_by_table",
]

__getattr__ = renamed(__name__)
