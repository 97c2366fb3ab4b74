"""The dense decoder-only transformer and its parts."""

from forge_core.model.attention import Attention
from forge_core.model.config import RopeScaling, TransformerConfig
from forge_core.model.context import TokenContext
from forge_core.model.feed_forward import FeedForward
from forge_core.model.init import Init, initialise
from forge_core.model.kv_cache import KVCache
from forge_core.model.norm import RMSNorm
from forge_core.model.transformer import Block, Transformer

__all__ = [
    "Attention",
    "Block",
    "FeedForward",
    "Init",
    "KVCache",
    "RMSNorm",
    "RopeScaling",
    "TokenContext",
    "Transformer",
    "TransformerConfig",
    "initialise",
]
