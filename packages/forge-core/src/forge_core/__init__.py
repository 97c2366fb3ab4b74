"""Transformers, losses, optimizers and generation for PyTorch."""

from forge_core import families
from forge_core._rules import Rule
from forge_core.flops import flops_per_token, parameter_count
from forge_core.generate import SAMPLING_RULES, SamplingConfig, generate, generate_stream
from forge_core.loss import TokenLoss, cross_entropy, fused_cross_entropy
from forge_core.model.attention import Attention
from forge_core.model.config import (
    ROPE_SCALING_RULES,
    TRANSFORMER_RULES,
    RopeScaling,
    TransformerConfig,
)
from forge_core.model.context import TokenContext
from forge_core.model.feed_forward import FeedForward
from forge_core.model.init import Init, initialise
from forge_core.model.kv_cache import KVCache
from forge_core.model.norm import RMSNorm
from forge_core.model.spec import ATTENTION_RULES, AttentionSpec
from forge_core.model.transformer import Transformer
from forge_core.optim import (
    OPTIMIZER_GROUP_RULES,
    OPTIMIZER_RULES,
    SCHEDULE_RULES,
    OptimizerConfig,
    ScheduleConfig,
    build_optimizer,
    build_schedule,
)

CAPABILITIES: tuple[Rule, ...] = (
    *TRANSFORMER_RULES,
    *ROPE_SCALING_RULES,
    *ATTENTION_RULES,
    *SAMPLING_RULES,
    *OPTIMIZER_RULES,
    *OPTIMIZER_GROUP_RULES,
    *SCHEDULE_RULES,
)

__all__ = [
    "CAPABILITIES",
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
