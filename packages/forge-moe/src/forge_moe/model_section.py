"""The mixtures of experts of a whole transformer: which layers are mixtures, and the options of all of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from forge_moe._shared.fields import Checked, field
from forge_moe._shared.problems import Problem, problems_of
from forge_moe.config import MoEConfig, MoEOptions

__all__ = ["TRAINING_OPTIONS", "MoESection"]

#: Options that change no output of the trained layers.
TRAINING_OPTIONS = tuple(
    [
        "aux_loss_weight",
        "aux_scope",
        "backend",
        "bias_center",
        "bias_schedule",
        "bias_update_rate",
        "capacity_factor",
        "dispatch_chunks",
        "dispatcher",
        "drop_policy",
        "sequence_loss_weight",
        "z_loss_weight",
    ]
)
_FROM_0, _FROM_1 = (0, math.inf), (1, math.inf)


@dataclass(frozen=True)
class MoESection(MoEOptions, Checked):
    """Mixture of experts in the built-in transformer; num_experts 0 is a dense model.

    Widths come from the model, and router losses always join the gradient.
    """

    num_experts: int = field(0, between=_FROM_0)
    """experts of a mixture; 0: every feed-forward is dense"""
    every_n_layers: int = field(1, between=_FROM_1)
    """every n-th layer is a mixture, the others are dense"""
    first_dense_layers: int = field(0, between=_FROM_0)
    """layers at the bottom that stay dense"""
    width_multiplier: float = field(1.0, between=(0, 2**20), positive=True)
    """width inside an expert, as a multiple of the dense hidden width"""
    dispatcher: str = "all_to_all"
    """how tokens travel with parallel.ep above 1: all_to_all, straight to their rank; hierarchical, once to its node; a registered one, or module:attribute"""
    dispatch_chunks: int = field(1, between=_FROM_1)
    """parts of a micro-batch's tokens, so that one travels while another is computed"""

    def _problems(self) -> Iterator[Problem]:
        if self.num_experts >= 1:
            try:
                self.layer_config(1, 1)  # widths come from the model, which checks them
            except ValueError as error:
                yield from problems_of(error)

    def is_mixture(self, layer: int) -> bool:
        """True when this layer's feed-forward is a mixture; counted from 0."""
        above = layer - self.first_dense_layers
        return self.num_experts > 0 and above >= 0 and above % self.every_n_layers == 0

    def layer_config(self, dim: int, dense_hidden_dim: int) -> MoEConfig:
        """The layer's own configuration: router losses join the gradient, the rest as given."""
        same = {f.name: getattr(self, f.name) for f in fields(MoEOptions)}
        hidden = max(1, round(dense_hidden_dim * self.width_multiplier))
        return MoEConfig(
            dim=dim, hidden_dim=hidden, num_experts=self.num_experts, aux="attach", **same
        )

    def training_options(self) -> dict[str, Any]:
        """Options that change no output of the trained layers and are off their defaults."""
        found = {key: getattr(self, key) for key in TRAINING_OPTIONS}
        return {key: v for key, v in found.items() if v != getattr(MoESection(), key)}
