"""Dense feed-forwards: SwiGLU and GELU.

Shapes: B rows, S tokens, D width of the residual stream, F width inside.
"""

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from forge_core.model.config import TransformerConfig
from forge_core.model.context import TokenContext
from forge_core.model.init import Init, linear_rows
from forge_core.registry import Registry


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020) when `gated`, else down(gelu(up(x))) with the exact GELU.

        FeedForward(dim=256, hidden_dim=704)(x)   # (B, S, D) -> (B, S, D)

    Without a gate there is no `gate_proj`.
    """

    def __init__(
        self, dim: int, hidden_dim: int, *, gated: bool = True, bias: bool = False
    ) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden_dim, bias=bias) if gated else None
        self.up_proj = nn.Linear(dim, hidden_dim, bias=bias)
        self.down_proj = nn.Linear(hidden_dim, dim, bias=bias)

    def forward(self, x: Tensor, ctx: TokenContext | None = None) -> Tensor:
        if self.gate_proj is None:
            hidden = F.gelu(self.up_proj(x))  # (B, S, F)
        else:
            hidden = F.silu(self.gate_proj(x)) * self.up_proj(x)  # (B, S, F)
        down: Tensor = self.down_proj(hidden)  # (B, S, D)
        return down

    def init_table(self, std: float, residual_std: float) -> dict[str, Init]:
        """How each parameter begins, by its name in this module."""
        return {
            **(linear_rows("gate_proj", self.gate_proj, std) if self.gate_proj else {}),
            **linear_rows("up_proj", self.up_proj, std),
            **linear_rows("down_proj", self.down_proj, residual_std),
        }

    def parallel_roles(self) -> dict[str, str]:
        """Role of each parameter under tensor parallelism, by pattern; see Transformer."""
        gate = {"gate_proj.*": "colwise"} if self.gate_proj else {}
        return {**gate, "up_proj.*": "colwise", "down_proj.*": "rowwise"}

    def flops_per_token(self, seq_len: int) -> float:
        """Forward FLOPs of the matrix products for one token."""
        matrices = (self.gate_proj, self.up_proj, self.down_proj)
        return 2.0 * sum(m.in_features * m.out_features for m in matrices if m is not None)


def _dense(config: TransformerConfig, layer: int, *, gated: bool) -> FeedForward:
    hidden, bias = config.resolved_hidden_dim, config.feed_forward_bias
    return FeedForward(config.dim, hidden, gated=gated, bias=bias)


FEED_FORWARDS = Registry(
    "model.feed_forward",
    "forge.feed_forwards",
    ("config", "layer"),
    {"swiglu": partial(_dense, gated=True), "gelu": partial(_dense, gated=False)},
)


def build_feed_forward(config: TransformerConfig, layer: int) -> nn.Module:
    """The feed-forward of a layer, counted from 0, that a config names."""
    builder = FEED_FORWARDS.find(config.feed_forward)
    feed_forward: nn.Module = builder(config, layer, **config.feed_forward_options)
    return feed_forward
