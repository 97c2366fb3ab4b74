"""Gated cross-attention from text to the images that each token sees (Flamingo, Llama 3.2 Vision).

Shapes: B sequences, S tokens of a sequence, N images of all sequences, T tokens of an image, n images of a sequence at most,
M = n T tokens of a sequence's images, D width of the stream, H query heads, K key/value heads, W width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_core import Init, TransformerConfig
from forge_core.kinds import ParameterKind
from forge_core.model import Block, RMSNorm, TokenContext, build_feed_forward
from forge_vlm._renamed import renamed
from forge_vlm._shared.problems import invalid
from forge_vlm.flops import expert_flops
from forge_vlm.fusion.config import CrossAttentionConfig
from forge_vlm.vision.features import Features

__all__ = [
    "CrossAttention",
    "CrossAttentionBlock",
    "VisibleImages",
    "check_images",
    "images_by_sequence",
    "visible_images",
    "with_cross_blocks",
]


class VisibleImages(NamedTuple):
    """Images for cross-attention: token s of row b sees the keys m with first[b, s] <= image_ids[b, m] < stop[b, s].

    features (B, M, D), None where keys and values are in the cache; image_ids (B, M) the number of the image of a key
    among those of all sequences, -1 for padding; first, stop (B, S).
    """

    features: Tensor | None
    image_ids: Tensor
    first: Tensor
    stop: Tensor

    def mask(self) -> Tensor:
        """(B, S, M) bool."""
        ids = self.image_ids[:, None]
        return (ids >= self.first[..., None]) & (ids < self.stop[..., None])

    def shard(self, split: Callable[[Tensor], Tensor]) -> VisibleImages:
        """What is about tokens, split as the stream is."""
        return self._replace(first=split(self.first), stop=split(self.stop))

    def newest(self) -> VisibleImages:
        """What the next token of each sequence sees, without the features."""
        return VisibleImages(None, self.image_ids, self.first[:, -1:], self.stop[:, -1:])

    def still(
        self, tokens: Tensor, document_ids: Tensor | None, newest: Sequence[int]
    ) -> VisibleImages:
        """What tokens (B, S) after the one that this is about see: the same, in the document `newest` of their row."""
        first, stop = self.first.expand(tokens.shape), self.stop.expand(tokens.shape)
        if document_ids is not None:
            last = torch.tensor(newest).to(document_ids.device, non_blocking=True)[:, None]
            same = (document_ids == last).cummin(dim=1).values.to(tokens.device, non_blocking=True)
            stop = torch.where(same, stop, first)
        return self._replace(first=first, stop=stop)


def visible_images(here: Tensor, document_ids: Tensor | None, sees: str) -> tuple[Tensor, Tensor]:
    """Numbers (B, S) of the first image that each token sees, and of the one after the last; equal where it sees none.

    here (B, S) is True on the token of an image, which sees its own image. Images are counted over all sequences; those of
    other documents are not seen. `sees` is "all" those before, the "last" only, or with it the images whose tokens stand
    directly before its own (the "group": Llama 3.2 Vision). No host sync.
    """
    stop = here.flatten().cumsum(0).view(here.shape)
    begins = torch.zeros_like(here)  # of rows and documents
    begins[:, 0] = True
    if document_ids is not None:
        ids = document_ids.to(here.device, non_blocking=True)
        begins[:, 1:] = ids[:, 1:] != ids[:, :-1]

    before = stop - here.long()
    first = torch.where(begins, before, 0).cummax(dim=1).values
    if sees == "last":
        first = torch.maximum(first, stop - 1)
    elif sees == "group":
        beside = torch.zeros_like(here)
        beside[:, 1:] = here[:, :-1]
        leads = here & (begins | ~beside)
        first = torch.maximum(first, torch.where(leads, before, 0).cummax(dim=1).values)

    return first, stop


def images_by_sequence(
    features: Tensor, here: Tensor, valid: Tensor | None, media: Any
) -> tuple[Tensor, Tensor]:
    """Features (B, M, D) of the images of each sequence, from those of all images (N, T, D), and the image_ids (B, M).

    valid (N, T) bool is False on tokens that nothing sees. A row without images has padding only. The most images of a
    row are read off `media.row_offsets`, on the host, or off `here`: that is one host sync on an accelerator.
    """
    count = here.sum(1)  # (B,)
    offsets = getattr(media, "row_offsets", None)
    most = int((count if offsets is None else offsets.diff()).max())
    slot = torch.arange(max(1, most), device=here.device)
    number = (count.cumsum(0) - count)[:, None] + slot  # (B, n)
    index = number.clamp(max=len(features) - 1)
    there = (slot < count[:, None])[..., None].expand(-1, -1, features.size(1))  # (B, n, T)
    if valid is not None:
        there = there & valid[index]
    image_ids = torch.where(there, number[..., None], -1).flatten(1)  # (B, M)
    rows = features.index_select(0, index.flatten()).unflatten(0, index.shape)  # (B, n, T, D)
    return rows.flatten(1, 2), image_ids


def check_images(
    here: Tensor, features: Features, given: int, document_ids: Tensor | None, media: Any
) -> None:
    """ValueError for features and document_ids that do not fit the tokens of images, and, where these are on the CPU,
    for another number of images than of their tokens, in a row whose part of `media` is known."""
    if features.layers:
        rule = "must be joint_decoder with an encoder that gives features for single layers"
        fix = f"this one gives {len(features.layers)}; use joint_decoder"
        raise invalid("fusion.name", "layers", "cross_attention", rule, fix)

    if given and len(features.tokens) != given:
        rule = f"must have an encoder that gives each of {given} images its own features, and this one gives {len(features.tokens)}"
        fix = "use images of one size, or joint_decoder"
        raise invalid("fusion.name", "packed", "cross_attention", rule, fix)

    if document_ids is not None and document_ids.shape != here.shape:
        rule = f"must have the shape {tuple(here.shape)} of full rows for images that come before"
        value = tuple(document_ids.shape)
        raise invalid("document_ids", "shape", value, rule, "give row_document_ids")

    tokens = int(here.sum()) if here.device.type == "cpu" else given
    if tokens != given:
        rule = f"must be as many as the tokens of images, {tokens}"
        fix = "put one token for each image, and give the images of all rows in order"
        raise invalid("images", "number", given, rule, fix)

    offsets = getattr(media, "row_offsets", None)
    if given and offsets is not None and here.device.type == "cpu":
        own, wanted = offsets.diff().tolist(), here.sum(1).tolist()
        if own + [0] * (len(wanted) - len(own)) != wanted:  # rows of text after may have none
            rule = f"of each row must be as many as its tokens, {wanted}"
            fix = "give each row the images whose tokens it holds"
            raise invalid("images", "by_row", own, rule, fix)


class CrossAttention(nn.Module):
    """Attention of tokens to the images that they see: `ctx.media` is a `VisibleImages`; heads and scale are those of the model.

    A token that sees no image gets exactly 0. Keys and values are computed where features are given, and kept in a cache
    that is given with them; later calls read them there. One call of scaled dot product attention with a boolean mask
    (B, 1, S, M), which all layers of a forward share.
    """

    def __init__(self, config: TransformerConfig, options: CrossAttentionConfig) -> None:
        super().__init__()
        self.head_dim, heads = config.resolved_head_dim, config.num_heads
        self.image_tokens = 0  # of a sequence, as FLOPs count them
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

    def _keys_and_values(self, media: VisibleImages, cache: Any) -> tuple[Tensor, Tensor]:
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
        """Forward FLOPs for one token of a sequence with `image_tokens` tokens of images: queries and output, its part of
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
    without `ctx.media` it does nothing. Under tensor parallelism each rank has the full weights and computes its own tokens
    of a sharded stream.
    """

    points = ()  # after closed gates, and nothing without images

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


__getattr__ = renamed(__name__)
