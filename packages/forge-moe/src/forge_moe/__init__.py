"""Mixture-of-experts routers, dispatch and grouped-GEMM experts for PyTorch."""

from typing import Any

from forge_moe import _renamed
from forge_moe.config import MoEConfig, RouterConfig
from forge_moe.dispatch import Dispatched, LocalDispatch
from forge_moe.experts import Experts, SortedExperts
from forge_moe.hooks import (
    MoEHooks,
    aux_losses,
    register_expert_bias_update,
    set_aux_scale,
    update_expert_bias,
)
from forge_moe.layer import MoE
from forge_moe.layouts import experts_from, experts_to
from forge_moe.load_balancing import AuxLosses
from forge_moe.parallel import expert_grad_norm, expert_parallelize, load_full_state
from forge_moe.replay import recompute_contexts
from forge_moe.router import Router, RoutingResult, RoutingRule
from forge_moe.upcycle import upcycle

__all__ = [
    "AuxLosses",
    "Dispatched",
    "Experts",
    "LocalDispatch",
    "MoE",
    "MoEConfig",
    "MoEHooks",
    "Router",
    "RouterConfig",
    "RoutingResult",
    "RoutingRule",
    "SortedExperts",
    "aux_losses",
    "expert_grad_norm",
    "expert_parallelize",
    "experts_from",
    "experts_to",
    "load_full_state",
    "recompute_contexts",
    "register_expert_bias_update",
    "set_aux_scale",
    "upcycle",
    "update_expert_bias",
]


def __getattr__(name: str) -> Any:
    return _renamed.find(__name__, __name__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
