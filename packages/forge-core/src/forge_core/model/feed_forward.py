"""Dense feed-forwards by name: an activation, with a gate or without.

Shapes: B sequences, S tokens, D width of the residual stream, F width inside.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from forge_core._renamed import renamed
from forge_core._shared.module_arguments import factory_arguments
from forge_core.flops import linear_flops
from forge_core.model.context import TokenContext
from forge_core.model.init import Init, linear_rows, reset_children
from forge_core.model.points import WithPoints
from forge_core.registry import Registry

if TYPE_CHECKING:
    from forge_core.model.config import TransformerConfig


class FeedForwardSpec(NamedTuple):
    """An activation, and whether its output is multiplied by a second projection of x."""

    activation: Callable[[Tensor], Tensor]
    gated: bool


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


_tanh_gelu = partial(F.gelu, approximate="tanh")
#: By name. GELU is exact, or the tanh approximation (Hendrycks & Gimpel 2016); gated ones are of Shazeer 2020,
#: squared ReLU of So et al. 2021.
SPECS = {
    "swiglu": FeedForwardSpec(F.silu, True),
    "geglu": FeedForwardSpec(F.gelu, True),
    "geglu_tanh": FeedForwardSpec(_tanh_gelu, True),
    "gelu": FeedForwardSpec(F.gelu, False),
    "gelu_tanh": FeedForwardSpec(_tanh_gelu, False),
    "relu": FeedForwardSpec(F.relu, False),
    "relu2": FeedForwardSpec(_squared_relu, False),
    "silu": FeedForwardSpec(F.silu, False),
}
GATED = tuple(name for name, spec in SPECS.items() if spec.gated)
UNGATED = tuple(name for name, spec in SPECS.items() if not spec.gated)


class FeedForward(WithPoints):
    """down(f(gate(x)) * up(x)), or without a gate down(f(up(x))), with the activation f of a `kind`.

        FeedForward(dim=256, hidden_dim=704)(x)   # SwiGLU: (B, S, D) -> (B, S, D)

    `gate_proj` and `up_proj` are linear layers D -> F, `down_proj` F -> D; without a gate there is no `gate_proj`. `gated` False without a kind is "gelu".
    """

    points = ("mlp_hidden",)

    @factory_arguments
    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        *,
        kind: str | None = None,
        gated: bool = True,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.kind = kind or ("swiglu" if gated else "gelu")
        self.activation, gated = SPECS[self.kind]
        self.gate_proj = nn.Linear(dim, hidden_dim, bias=bias) if gated else None
        self.up_proj = nn.Linear(dim, hidden_dim, bias=bias)
        self.down_proj = nn.Linear(hidden_dim, dim, bias=bias)

    def reset_parameters(self) -> None:
        """Draw initial values of the linear layers, those of `nn.Linear`; see also `forge_core.initialize`."""
        reset_children(self)

    def extra_repr(self) -> str:
        return self.kind

    def forward(self, x: Tensor, ctx: TokenContext | None = None) -> Tensor:
        if self.gate_proj is None:
            hidden = self.activation(self.up_proj(x))  # (B, S, F)
        else:
            hidden = self.activation(self.gate_proj(x)) * self.up_proj(x)  # (B, S, F)
        return self.down_proj(self.point("mlp_hidden", hidden))  # (B, S, D)

    def init_table(self, std: float, residual_std: float) -> dict[str, Init]:
        """Initial values by local name; the output projection writes into the residual stream."""
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
        """Forward FLOPs of the matmuls for one token."""
        return linear_flops(self.gate_proj, self.up_proj, self.down_proj)


def _build_dense(config: TransformerConfig, layer: int, *, kind: str) -> FeedForward:
    hidden, bias = config.resolved_hidden_dim, config.feed_forward_bias
    return FeedForward(config.dim, hidden, kind=kind, bias=bias)


FEED_FORWARDS = Registry(
    "model.feed_forward",
    "forge.feed_forwards",
    ("config", "layer"),
    {name: partial(_build_dense, kind=name) for name in SPECS},
)


def build_feed_forward(config: TransformerConfig, layer: int) -> nn.Module:
    """Build the feed-forward of a layer, counted from 0, that a config names."""
    builder = FEED_FORWARDS.find(config.feed_forward)
    return builder(config.as_standard(), layer, **config.feed_forward_options)


__getattr__ = renamed(__name__)
