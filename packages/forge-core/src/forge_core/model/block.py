"""A block of the decoder, and the arguments with which it calls its parts.

Shapes: B rows, S tokens, D width of the residual stream.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from forge_core.model.config import TransformerConfig
from forge_core.model.context import TokenContext
from forge_core.model.kv_cache import LayerCache
from forge_core.model.norm import build_norm


class Block(nn.Module):
    """x + mixer(norm(x)), then x + feed_forward(norm(x)): (B, S, D) -> (B, S, D)."""

    def __init__(
        self, config: TransformerConfig, mixer: nn.Module, feed_forward: nn.Module
    ) -> None:
        super().__init__()
        self.mixer_norm = build_norm(config)
        self.mixer = mixer
        self.feed_forward_norm = build_norm(config)
        self.feed_forward = feed_forward

    def forward(self, x: Tensor, ctx: TokenContext, cache: LayerCache | None = None) -> Tensor:
        x = x + self.mixer(self.mixer_norm(x), ctx, cache)
        x = x + self.feed_forward(self.feed_forward_norm(x), ctx)
        return x

    def prepare(self, ctx: TokenContext, x: Tensor, cache: LayerCache | None = None) -> None:
        """Let the mixer derive from ctx what all layers share."""
        prepare(self.mixer, ctx, x, cache)

    def parallel_roles(self) -> dict[str, Any]:
        """Roles of the norms (tokens may be sharded there) and of the two sublayers."""
        roles: dict[str, Any] = {
            "mixer_norm.*": "sequence",
            "feed_forward_norm.*": "sequence",
        }
        for name in ("mixer", "feed_forward"):
            roles.update(roles_of(getattr(self, name), name))
        return roles

    def flops_per_token(self, seq_len: int) -> float:
        """Forward FLOPs of the two sublayers for one token."""
        return flops_of(self.mixer, seq_len) + flops_of(self.feed_forward, seq_len)


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


def flops_of(module: nn.Module, seq_len: int) -> float:
    """Forward FLOPs of a part for one token; ValueError where it does not count them."""
    offer: Any = getattr(module, "flops_per_token", None)
    if offer is None:
        raise ValueError(
            f"{type(module).__name__} does not count its FLOPs; "
            "give it a method flops_per_token(seq_len) -> float"
        )
    return float(offer(seq_len))
