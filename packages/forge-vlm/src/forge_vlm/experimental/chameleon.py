"""Attention of Chameleon, with a LayerNorm for each head (Chameleon team 2024, arXiv 2405.09818).

Shapes: B sequences, S tokens, H heads, D width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_core import Attention, TransformerConfig
from forge_core.kinds import ParameterKind
from forge_vlm._shared.problems import invalid

__all__ = ["ChameleonAttention", "HeadLayerNorm"]

_EPS = 1e-5  # whatever the config's norm_eps is


class HeadLayerNorm(nn.Module):
    """LayerNorm over the width of a head, with weights of each head: (..., H, D) -> (..., H, D)."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, width))
        self.bias = nn.Parameter(torch.empty(heads, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the initial values, also after `to_empty`."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], eps=_EPS) * self.weight + self.bias

    def parameter_kinds(self) -> dict[str, ParameterKind]:
        """A norm and a bias for each head; they begin at ones and zeros."""
        return {"weight": "stacked_norm", "bias": "stacked_bias"}


class ChameleonAttention(Attention):
    """Attention with a `HeadLayerNorm` on queries and on keys, as `mixer` of a config by its import path.

    TransformerConfig(vocab_size=256, mixer="forge_vlm.families.chameleon:ChameleonAttention")
    """

    def __init__(self, config: TransformerConfig, layer: int) -> None:
        super().__init__(config)
        if config.qk_norm:
            rule = "duplicates the norms of Chameleon"
            raise invalid("qk_norm", "excludes", True, rule, "remove it")
        self.norms_heads = True
        norms: Any = [
            HeadLayerNorm(heads, self.head_dim)
            for heads in (config.num_heads, config.resolved_num_kv_heads)
        ]
        self.q_norm, self.k_norm = norms

    def parallel_roles(self) -> dict[str, Any]:
        """Whole on each rank: weights of the norms differ by head."""
        return {"*": "opaque"}
