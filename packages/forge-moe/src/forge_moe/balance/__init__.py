"""Keeping experts evenly busy: losses, their scopes, and the loss-free bias."""

from forge_moe.balance.bias import update_expert_bias
from forge_moe.balance.terms import AuxLosses, aux_losses, set_aux_scale

__all__ = ["AuxLosses", "aux_losses", "set_aux_scale", "update_expert_bias"]
