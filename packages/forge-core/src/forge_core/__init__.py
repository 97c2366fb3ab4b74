"""Transformers, losses, optimizers and generation for PyTorch."""

import importlib
import sys
from typing import Any

from forge_core import families
from forge_core._renamed import OLD_MODULES, renamed
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
from forge_core.model.mla import LatentAttention, MLAConfig
from forge_core.model.norm import RMSNorm
from forge_core.model.rope import RopeScaling
from forge_core.model.transformer import Transformer
from forge_core.optim import (
    EMA,
    AdamW,
    EMAConfig,
    Lion,
    Muon,
    OptimizerConfig,
    OptimizerGroupConfig,
    ScheduleConfig,
    ScheduleFreeAdamW,
    build_optimizer,
    build_schedule,
    param_groups,
    set_lr,
)

__all__ = [
    "EMA",
    "AdamW",
    "Attention",
    "AttentionSpec",
    "EMAConfig",
    "FeedForward",
    "Init",
    "KVCache",
    "LatentAttention",
    "LinearCrossEntropy",
    "Lion",
    "MLAConfig",
    "Muon",
    "OptimizerConfig",
    "OptimizerGroupConfig",
    "RMSNorm",
    "RopeScaling",
    "SamplingConfig",
    "ScheduleConfig",
    "ScheduleFreeAdamW",
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
    "interp",
    "lora",
    "param_groups",
    "parameter_count",
    "scaling",
    "set_lr",
]

#: Modules that are imported at first use: few programs need them.
_LAZY = ("interp", "lora", "scaling")

# first: an upgrade in place leaves folders with __pycache__ only, which are packages without content
sys.meta_path.insert(0, OLD_MODULES)
_old_name = renamed(__name__, level=3)


def __getattr__(name: str) -> Any:
    return importlib.import_module(f"{__name__}.{name}") if name in _LAZY else _old_name(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
