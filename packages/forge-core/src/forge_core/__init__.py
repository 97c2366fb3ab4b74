"""Transformers, losses, optimizers and generation for PyTorch."""

import sys

from forge_core import families
from forge_core._renamed import OldModules, renamed
from forge_core.flops import flops_per_token, parameter_count
from forge_core.generate import SamplingConfig, generate, generate_stream
from forge_core.loss import LinearCrossEntropy, TokenLoss, cross_entropy, fused_cross_entropy
from forge_core.model.attention import Attention
from forge_core.model.attention_ops import AttentionSpec
from forge_core.model.config import TransformerConfig
from forge_core.model.context import TokenContext
from forge_core.model.feed_forward import FeedForward
from forge_core.model.init import Init, initialize
from forge_core.model.kv_cache import KVCache
from forge_core.model.norm import RMSNorm
from forge_core.model.rope import RopeScaling
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
    "LinearCrossEntropy",
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
    "initialize",
    "parameter_count",
]

# first: an upgrade in place leaves folders with __pycache__ only, which are packages without content
sys.meta_path.insert(0, OldModules)
__getattr__ = renamed(__name__)
