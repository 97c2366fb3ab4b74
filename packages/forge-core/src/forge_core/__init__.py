"""Transformers, losses, optimizers and generation for PyTorch."""

from forge_core import families
from forge_core.flops import flops_per_token, parameter_count
from forge_core.generate import SamplingConfig, generate, generate_stream
from forge_core.loss import TokenLoss, cross_entropy, fused_cross_entropy
from forge_core.model.attention import Attention
from forge_core.model.config import (
    RopeScaling,
    TransformerConfig,
)
from forge_core.model.context import TokenContext
from forge_core.model.feed_forward import FeedForward
from forge_core.model.init import Init, initialise
from forge_core.model.kv_cache import KVCache
from forge_core.model.norm import RMSNorm
from forge_core.model.spec import AttentionSpec
from forge_core.model.transformer import Transformer
from forge_core.optim import (
    OptimizerConfig,
    ScheduleConfig,
    build_optimizer,
    build_schedule,
)

__all__ = [
    "Attention",
    "AttentionSpec",
    "FeedForward",
    "Init",
    "KVCache",
    "OptimizerConfig",
    "RMSNorm",
    "RopeScaling",
    "SamplingConfig",
    "ScheduleConfig",
    "TokenContext",
    "TokenLoss",
    "Transformer",
    "TransformerConfig",
    "build_optimizer",
    "build_schedule",
    "cross_entropy",
    "families",
    "flops_per_token",
    "fused_cross_entropy",
    "generate",
    "generate_stream",
    "initialise",
    "parameter_count",
]
