"""Blocks of the decoder, and the parts inside of them by the names in a config.

A part of your own is an entry point of the registry's group or an import path `module:attr`, and is called as

    mixer                 part(config.of_layer(layer), layer, **options) layer counts from 0
    feed_forward          part(config, layer, **options)
    norm                  part(dim, eps, **options)
    block                 part(config, mixer, feed_forward, **options)   both are modules
    rope_scaling          part(frequencies, scaling, **options)          see `inverse_frequencies`
    attention.mask        part(ctx, queries, keys)                       see `AttentionSpec`

with the options of `config.mixer_options` and so on, which must be in its signature. Its config is in the standard
parametrization (`config.as_standard()`), which has the factors of any other one as scales.

Shapes: B sequences, S tokens, D width of the residual stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from forge_core._shared.problems import raise_problems
from forge_core.flops import forward_flops
from forge_core.model.attention import Attention
from forge_core.model.attention_ops import MASKS
from forge_core.model.context import TokenContext
from forge_core.model.feed_forward import FEED_FORWARDS
from forge_core.model.init import reset_children
from forge_core.model.kv_cache import LayerCache
from forge_core.model.mla import LatentAttention
from forge_core.model.norm import NORMS, build_norm
from forge_core.model.points import WithPoints
from forge_core.model.rope import ROPE_SCALINGS
from forge_core.registry import Registry

if TYPE_CHECKING:
    from forge_core.model.config import TransformerConfig


class Block(WithPoints):
    """x + mixer(norm(x)), then x + feed_forward(norm(x)): (B, S, D) -> (B, S, D).

    The output of each sublayer is multiplied by `config.residual_scale` (Granite).
    """

    #: Names of its norms; each sees the stream, or the output of a sublayer.
    norms: tuple[str, ...] = ("mixer_norm", "feed_forward_norm")
    #: Output of the first sublayer, the stream between the two, output of the second: each (B, S, D).
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

    def reset_parameters(self) -> None:
        """Draw initial values of norms and sublayers that have them; see also `forge_core.initialize`."""
        reset_children(self)

    def scaled(self, branch: Tensor) -> Tensor:
        """Multiply the output of a sublayer by the residual scale."""
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
    method: Any = getattr(module, "prepare", None)
    if method is not None:
        method(ctx, x, cache)


def roles_of(module: nn.Module, prefix: str) -> Iterator[tuple[str, Any]]:
    """Tensor-parallel roles of a module with its prefix; "opaque" for all parameters if it declares none."""
    method: Any = getattr(module, "parallel_roles", None)
    if method is not None:
        roles: dict[str, Any] = method()
    else:
        roles = {"*": "opaque"} if any(True for _ in module.parameters()) else {}
    return ((f"{prefix}.{pattern}", role) for pattern, role in roles.items())


MIXERS = Registry(
    "model.mixer",
    "forge.mixers",
    ("config", "layer"),
    {
        "attention": lambda config, layer: Attention(config),
        "mla": lambda config, layer: LatentAttention(config),
    },
)
BLOCKS = Registry(
    "model.block",
    "forge.blocks",
    ("config", "mixer", "feed_forward"),
    {"pre_norm": Block, "post_norm": PostNormBlock, "sandwich": SandwichBlock},
)


def build_mixer(config: TransformerConfig, layer: int) -> nn.Module:
    """Build the token mixer of a layer, counted from 0, that a config names; it gets the config of the layer."""
    build = MIXERS.find(config.mixer)
    own = config.as_standard().of_layer(layer)
    return build(own, layer, **config.mixer_options)


def build_block(config: TransformerConfig, mixer: nn.Module, feed_forward: nn.Module) -> nn.Module:
    """Build the block around two sublayers that a config names."""
    builder = BLOCKS.find(config.block)
    return builder(config.as_standard(), mixer, feed_forward, **config.block_options)


def check_parts(config: TransformerConfig) -> None:
    """Raise one ValueError for all names without a part and all options that a part does not take or lacks.

    Parts are imported and their signatures read; none is called.
    """
    named = [
        (MIXERS, config.mixer, config.mixer_options),
        (NORMS, config.norm, config.norm_options),
        (FEED_FORWARDS, config.feed_forward, config.feed_forward_options),
        (BLOCKS, config.block, config.block_options),
    ]
    if config.attention.mask != "causal":
        named.append((MASKS, config.attention.mask, {}))
    if config.rope_scaling is not None:
        named.append((ROPE_SCALINGS, config.rope_scaling.name, config.rope_scaling.options))
    raise_problems("", (p for parts, name, opts in named for p in parts.problems(name, opts)))
