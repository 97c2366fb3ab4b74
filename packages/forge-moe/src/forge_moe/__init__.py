"""Mixture-of-experts routers, dispatch and grouped-GEMM experts for PyTorch."""

from forge_moe.balance.losses import AuxLosses
from forge_moe.config import MoEConfig, RouterConfig
from forge_moe.dispatch import Dispatched, LocalDispatch
from forge_moe.experts import Experts
from forge_moe.full_state import load_full_state
from forge_moe.grad_norm import expert_grad_norm
from forge_moe.layer import MoE
from forge_moe.parallel import expert_parallelize
from forge_moe.replay import recompute_contexts
from forge_moe.routers import Routed, Router, RoutingRule
from forge_moe.sorted_experts import SortedExperts
from forge_moe.training_step import aux_losses, set_aux_scale, update_expert_bias
from forge_moe.upcycle import upcycle

__all__ = [
    "AuxLosses",
    "Dispatched",
    "Experts",
    "LocalDispatch",
    "MoE",
    "MoEConfig",
    "Routed",
    "Router",
    "RouterConfig",
    "RoutingRule",
    "SortedExperts",
    "aux_losses",
    "expert_grad_norm",
    "expert_parallelize",
    "load_full_state",
    "recompute_contexts",
    "set_aux_scale",
    "upcycle",
    "update_expert_bias",
]
