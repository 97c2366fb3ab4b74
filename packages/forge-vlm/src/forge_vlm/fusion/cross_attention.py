"""Gated cross-attention: text reads images, which are no part of its stream (Flamingo, Llama 3.2 Vision).

Shapes: B rows, S tokens, M tokens of a row's images, D width of the stream, H query heads, K key/value heads, W width of a
head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_core import Init, TransformerConfig
from forge_core.kinds import ParameterKind
from forge_core.model import Block, RMSNorm, TokenContext, build_feed_forward
from forge_vlm.fusion.cross_config import CrossAttentionConfig
from forge_vlm.fusion.experts import expert_flops
from forge_vlm.fusion.seen import Seen

__all__ = ["CrossAttention", "CrossAttentionBlock", "with_cross_blocks"]


class CrossAttention(nn.Module):
    """Attention of tokens to the images that they see: `ctx.media` is a `Seen`; heads and scale are those of the model.

    A token that sees no image gets exactly 0. Keys and values are computed where features are given, and kept in a cache
    that is given with them; later calls read them there. One call of scaled dot product attention with a boolean mask
    (B, 1, S, M), which all layers of a forward share.
    """

    def __init__(self, config: TransformerConfig, options: CrossAttentionConfig) -> None:
        super().__init__()
        self.head_dim, heads = config.resolved_head_dim, config.num_heads
        self.image_tokens = 0  # of a row, as FLOPs count them
        self.scale = config.as_standard().attention.scale
        self.width, kv_width = (n * self.head_dim for n in (heads, config.resolved_num_kv_heads))
        self.q_proj = nn.Linear(config.dim, self.width, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.dim, kv_width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.dim, kv_width, bias=config.qkv_bias)
        self.o_proj = nn.Linear(self.width, config.dim, bias=config.o_bias)
        norm = options.qk_norm
        self.q_norm = RMSNorm(self.head_dim, config.norm_eps) if norm else None
        self.k_norm = RMSNorm(self.head_dim, config.norm_eps) if norm else None

    def prepare(self, ctx: TokenContext, x: Tensor, cache: Any = None) -> tuple[Tensor, Tensor]:
        """Masks, once for all layers: what is computed (B, 1, S, M), and which tokens see an image (B, S, 1)."""

        def make() -> tuple[Tensor, Tensor]:
            mask = ctx.media.mask()
            sighted = mask.any(-1, keepdim=True)
            # a row of scores without any entry would be nan; who sees nothing is computed, and dropped
            return (mask | ~sighted)[:, None], sighted

        return ctx.once("images seen", make)

    def forward(self, x: Tensor, ctx: TokenContext, cache: Any = None) -> Tensor:
        mask, sighted = self.prepare(ctx, x, cache)
        q = self._queries(x)
        k, v = self._keys_and_values(ctx.media, cache)  # (B, K, M, W)
        seen = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.to(q.dtype),
            v.to(q.dtype),
            attn_mask=mask,
            scale=self.scale,
            enable_gqa=True,
        )
        out: Tensor = self.o_proj(seen.transpose(1, 2).flatten(2))  # (B, S, D)
        return torch.where(sighted, out, 0.0)

    def attention_weights(self, x: Tensor, ctx: TokenContext, cache: Any = None) -> Tensor:
        """What each token takes of each token of images, (B, H, S, M) fp32, 0 where it sees none; arguments as of forward."""
        mask, sighted = self.prepare(ctx, x, cache)
        k, _ = self._keys_and_values(ctx.media, cache)  # (B, K, M, W)
        q = self._queries(x).transpose(1, 2)
        keys = k.float().repeat_interleave(q.size(1) // k.size(1), dim=1)  # (B, H, M, W)
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        scores = (q.float() @ keys.mT * scale).masked_fill(~mask, -torch.inf)
        return torch.where(sighted[:, None], scores.softmax(-1), 0.0)

    def _queries(self, x: Tensor) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))  # (B, S, H, W)
        return q if self.q_norm is None else self.q_norm(q)

    def _keys_and_values(self, media: Seen, cache: Any) -> tuple[Tensor, Tensor]:
        if media.features is None:
            assert cache is not None
            return cache.keys, cache.values
        k = self.k_proj(media.features).unflatten(-1, (-1, self.head_dim))  # (B, M, K, W)
        v = self.v_proj(media.features).unflatten(-1, (-1, self.head_dim))
        k = k if self.k_norm is None else self.k_norm(k)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        if cache is not None:
            cache.keys, cache.values = k.detach(), v.detach()
        return k, v

    def init_table(self, std: float, residual_std: float) -> dict[str, Init]:
        """The projection into the stream begins as those of other blocks; the rest by its kind."""
        return {"o_proj.weight": Init("normal", residual_std)}

    def flops_per_token(self, seq_len: int) -> float:
        """Forward FLOPs for one token of a row with `image_tokens` tokens of images: queries and output, its part of
        keys and values, scores and weighted sum."""
        return self._products(seq_len, frozen=False) + 4.0 * self.width * self.image_tokens

    def spared_flops_per_token(self, seq_len: int) -> float:
        """FLOPs of the backward that frozen projections spare one token."""
        return self._products(seq_len, frozen=True)

    def _products(self, seq_len: int, *, frozen: bool) -> float:
        share = self.image_tokens / seq_len
        often = ((self.q_proj, 1.0), (self.o_proj, 1.0), (self.k_proj, share), (self.v_proj, share))
        return sum(times * expert_flops(proj, 1, frozen=frozen) for proj, times in often)


class CrossAttentionBlock(Block):
    """x + tanh(a) cross_attention(norm(x)), then x + tanh(b) feed_forward(norm(x)): (B, S, D) -> (B, S, D).

    The gates a and b begin at 0, where the block is the identity. It is that for tokens that see no image always, and
    without `ctx.media` it does nothing. Under tensor parallelism each rank has the whole weights and computes its own tokens
    of a sharded stream.
    """

    points = ()  # behind closed gates, and nothing without images

    def __init__(
        self, config: TransformerConfig, options: CrossAttentionConfig, layer: int
    ) -> None:
        super().__init__(config, CrossAttention(config, options), build_feed_forward(config, layer))
        self.mixer_gate = nn.Parameter(torch.empty(1))
        self.feed_forward_gate = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Close the gates, also after `to_empty`; its layers have initial values of their own."""
        nn.init.zeros_(self.mixer_gate)
        nn.init.zeros_(self.feed_forward_gate)

    def forward(self, x: Tensor, ctx: TokenContext, cache: Any = None) -> Tensor:
        if ctx.media is None:
            return x
        _, sighted = self.mixer.prepare(ctx, x, cache)  # type: ignore[operator]
        seen = self.mixer(self.mixer_norm(x), ctx, cache)
        x = x + self.scaled(self.mixer_gate.tanh() * seen)
        fed = self.feed_forward(self.feed_forward_norm(x), ctx)
        return x + self.scaled(self.feed_forward_gate.tanh() * torch.where(sighted, fed, 0.0))

    def prepare(self, ctx: TokenContext, x: Tensor, cache: Any = None) -> None:
        """Make the masks before the first block."""
        if ctx.media is not None:
            super().prepare(ctx, x, cache)

    def parameter_kinds(self) -> dict[str, ParameterKind]:
        """Gates, which begin closed, at 0."""
        return {"mixer_gate": "vector", "feed_forward_gate": "vector"}

    def parallel_roles(self) -> dict[str, str]:
        """Whole weights on each rank, also of linear layers; every token is by itself."""
        return {"*": "sequence"}


def with_cross_blocks(
    layers: nn.ModuleDict, config: TransformerConfig, options: CrossAttentionConfig
) -> nn.ModuleDict:
    """The layers with a block "cross_i" before each text layer "i" that has one."""
    before, found = options.before(config.num_layers), dict[str, nn.Module]()
    for key, layer in layers.items():
        if int(key) in before:
            found[f"cross_{key}"] = CrossAttentionBlock(config, options, int(key))
        found[key] = layer
    return nn.ModuleDict(found)
