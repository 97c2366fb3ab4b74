"""Blocks of the decoder, by where their norms stand, and the arguments with which they call their parts.

Shapes: B rows, S tokens, D width of the residual stream.
"""

from collections.abc import Iterator
from typing import Any, ClassVar

from torch import Tensor, nn

from forge_core.flops import forward_flops
from forge_core.model.config import TransformerConfig
from forge_core.model.context import TokenContext
from forge_core.model.kv_cache import LayerCache
from forge_core.model.norm import build_norm
from forge_core.model.points import WithPoints


class Block(WithPoints):
    """x + mixer(norm(x)), then x + feed_forward(norm(x)): (B, S, D) -> (B, S, D).

    What a sublayer adds is multiplied by `config.residual_scale` (Granite).
    """

    #: Names of its norms; each sees the stream, or what a sublayer adds to it.
    norms: tuple[str, ...] = ("mixer_norm", "feed_forward_norm")
    #: What the first sublayer adds to the stream, the stream between the two, what the second adds: each (B, S, D).
    points: ClassVar[tuple[str, ...]] = ("attn_out", "resid_mid", "mlp_out")

    def __init__(
        self, config: TransformerConfig, mixer: nn.Module, feed_forward: nn.Module
    ) -> None:
        super().__init__()
        self.residual_scale = config.as_standard().residual_scale
        self.mixer_norm = build_norm(config)
        self.mixer = mixer
        self.feed_forward_norm = build_norm(config)
        self.feed_forward = feed_forward

    def forward(self, x: Tensor, ctx: TokenContext, cache: LayerCache | None = None) -> Tensor:
        mixed = self.mixer(self.mixer_norm(x), ctx, cache)
        x = self.point("resid_mid", x + self.point("attn_out", self.scaled(mixed)))
        fed = self.feed_forward(self.feed_forward_norm(x), ctx)
        return x + self.point("mlp_out", self.scaled(fed))

    def scaled(self, branch: Tensor) -> Tensor:
        """What a sublayer adds to the stream."""
        return branch if self.residual_scale == 1.0 else branch * self.residual_scale

    def prepare(self, ctx: TokenContext, x: Tensor, cache: LayerCache | None = None) -> None:
        """Let the sublayers derive from ctx what all layers share."""
        prepare(self.mixer, ctx, x, cache)
        prepare(self.feed_forward, ctx, x, cache)

    def parallel_roles(self) -> dict[str, Any]:
        """Roles of the norms (tokens may be sharded there) and of the two sublayers."""
        roles: dict[str, Any] = {f"{name}.*": "sequence" for name in self.norms}
        for name in ("mixer", "feed_forward"):
            roles.update(roles_of(getattr(self, name), name))
        return roles

    def flops_per_token(self, seq_len: int) -> float:
        """Forward FLOPs of the two sublayers for one token."""
        return forward_flops(self.mixer, seq_len) + forward_flops(self.feed_forward, seq_len)


class PostNormBlock(Block):
    """x + norm(mixer(x)), then x + norm(feed_forward(x)) (OLMo 2, Swin V2): (B, S, D) -> (B, S, D)."""

    norms = ("mixer_post_norm", "feed_forward_post_norm")

    def __init__(
        self, config: TransformerConfig, mixer: nn.Module, feed_forward: nn.Module
    ) -> None:
        nn.Module.__init__(self)
        self.residual_scale = config.as_standard().residual_scale
        self.mixer = mixer
        self.mixer_post_norm = build_norm(config)
        self.feed_forward = feed_forward
        self.feed_forward_post_norm = build_norm(config)

    def forward(self, x: Tensor, ctx: TokenContext, cache: LayerCache | None = None) -> Tensor:
        mixed = self.mixer_post_norm(self.mixer(x, ctx, cache))
        x = self.point("resid_mid", x + self.point("attn_out", self.scaled(mixed)))
        fed = self.feed_forward_post_norm(self.feed_forward(x, ctx))
        return x + self.point("mlp_out", self.scaled(fed))


class SandwichBlock(Block):
    """A norm before and after each sublayer (Gemma 2 and 3): x + norm(mixer(norm(x))), and so on."""

    norms = (*Block.norms, *PostNormBlock.norms)

    def __init__(
        self, config: TransformerConfig, mixer: nn.Module, feed_forward: nn.Module
    ) -> None:
        super().__init__(config, mixer, feed_forward)
        self.mixer_post_norm = build_norm(config)
        self.feed_forward_post_norm = build_norm(config)

    def forward(self, x: Tensor, ctx: TokenContext, cache: LayerCache | None = None) -> Tensor:
        mixed = self.mixer_post_norm(self.mixer(self.mixer_norm(x), ctx, cache))
        x = self.point("resid_mid", x + self.point("attn_out", self.scaled(mixed)))
        fed = self.feed_forward_post_norm(self.feed_forward(self.feed_forward_norm(x), ctx))
        return x + self.point("mlp_out", self.scaled(fed))


def prepare(module: nn.Module, ctx: TokenContext, x: Tensor, cache: LayerCache | None) -> None:
    """Call `prepare` of a module that has it, which derives from ctx values for all layers."""
    offer: Any = getattr(module, "prepare", None)
    if offer is not None:
        offer(ctx, x, cache)


def roles_of(module: nn.Module, prefix: str) -> Iterator[tuple[str, Any]]:
    """Rows of a module with its prefix; one "opaque" row where it declares none."""
    offer = getattr(module, "parallel_roles", None)
    if offer is not None:
        rows: dict[str, Any] = offer()
    else:
        rows = {"*": "opaque"} if any(True for _ in module.parameters()) else {}
    return ((f"{prefix}.{pattern}", role) for pattern, role in rows.items())
