"""Grouped-query attention with rotary positions, packed documents and a KV cache.

Shapes: B sequences, S tokens, M width of the residual stream, H query heads, K key/value heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from forge_core._shared.module_arguments import FromConfig, config_arguments
from forge_core._shared.problems import invalid
from forge_core._torch_compat import not_compiled
from forge_core.flops import linear_flops
from forge_core.model.attention_flex import attend_flex, dense_blocks, flex_computes
from forge_core.model.attention_ops import (
    MASKS,
    AttentionSpec,
    attend_documents,
    attend_sequences,
    attention_scores,
    attention_weights,
    causal_mask,
    document_starts,
    mix_values,
    reference_attention,
)
from forge_core.model.context import TokenContext, default_positions
from forge_core.model.init import Init, linear_rows, reset_children
from forge_core.model.kv_cache import LayerCache
from forge_core.model.norm import build_head_norm
from forge_core.model.points import WithPoints
from forge_core.model.rope import (
    MRopeConfig,
    RopeScaling,
    attention_factor,
    inverse_frequencies,
    rope_tables,
    rotate,
)

if TYPE_CHECKING:
    from forge_core.model.config import TransformerConfig

Tables = tuple[Tensor, Tensor]
Attend = Callable[..., Tensor]

#: For `config_arguments`: its module imports this one.
CONFIG = "forge_core.model.config:TransformerConfig"


class LocalAttention:
    """Attention of unsharded sequences in this process; computes every field of its spec.

    Each token sees its sequence so far, or its document so far where ctx.document_ids split the sequence. A mask of
    its own is given the full sequences of ctx; it holds (B, H, S, S) scores, or (B or 1, S, S) bool on CUDA. A `ctx.mask`
    takes the place of all that.
    """

    #: Of how many ranks each has a part of a sequence's tokens.
    ranks_of_row = 1
    #: Whether it computes the mask of a context.
    takes_mask = True
    #: Whether values may be narrower than queries and keys.
    takes_narrow_values = True

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self._mask = None if spec.mask == "causal" else MASKS.checked(spec.mask, {})

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, ctx: TokenContext, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend within ctx: q (B, S, H, D), k and v (B, S, K, D), sinks (H,) -> like q."""
        if ctx.mask is not None:
            return ctx.mask.attend(q, k, v, self.spec, sinks)
        if self._mask is not None:
            mask = self._visible(self._mask, ctx, q.size(1), q.device)
            if flex_computes(q):
                return _attend_by_flex(ctx, q, k, v, mask, self.spec, sinks)
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, H or K, S, D)
            return reference_attention(q, k, v, mask, self.spec, sinks).transpose(1, 2)
        if ctx.document_ids is None:
            return attend_sequences(q, k, v, self.spec, sinks)
        return _attend_documents_of(ctx, q, k, v, self.spec, sinks)

    def weights(
        self, q: Tensor, k: Tensor, ctx: TokenContext, sinks: Tensor | None = None
    ) -> Tensor:
        """Attention probabilities (B, H, S, S), fp32 at least; arguments are those of the call, without values."""
        return self.softmax(self.scores(q, k), ctx, sinks)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Scaled scores q k, before soft-cap and mask: (B, H, S, S) fp32 at least."""
        return attention_scores(q.transpose(1, 2), k.transpose(1, 2), self.spec)

    def softmax(self, scores: Tensor, ctx: TokenContext, sinks: Tensor | None = None) -> Tensor:
        """Attention probabilities of `scores`: soft-cap, mask and sinks of the spec. ValueError for a `ctx.mask`."""
        if ctx.mask is not None:
            rule = f"is a {type(ctx.mask).__name__}, and weights with a mask of the call are not computed"
            fix = "read q, k and head_out, or call the model without it"
            raise invalid("mask", "weights", ..., rule, fix)
        mask = self._visible(self._mask or causal_mask, ctx, scores.size(-1), scores.device)
        return attention_weights(scores, mask, self.spec, sinks)

    def mix(self, weights: Tensor, v: Tensor) -> Tensor:
        """The output (B, S, H, D) of `weights` (B, H, S, S) and values v (B, S, K, D), in the dtype of v."""
        return mix_values(weights, v.transpose(1, 2)).transpose(1, 2).to(v.dtype)

    def _visible(
        self, mask: Callable[..., Tensor], ctx: TokenContext, size: int, device: torch.device
    ) -> Tensor:
        """(B or 1, 1, S, S) bool: `mask` within documents and the window, and each token itself."""

        def make() -> Tensor:
            index = torch.arange(size, device=device)
            distance = index[:, None] - index
            seen = mask(ctx, index, index)
            if self.spec.window is not None:
                seen = seen & (distance < self.spec.window)
            if ctx.document_ids is not None:
                ids = ctx.document_ids.to(device, non_blocking=True)
                number = document_starts(ids).cumsum(1)  # (B, S)
                seen = seen & (number[:, :, None] == number[:, None, :])
            # the diagonal, or the softmax of a token that sees nothing would be nan
            return (seen | (distance == 0)).unsqueeze(1)

        return ctx.once(("mask", self.spec.mask, self.spec.window, device), make)


@not_compiled  # torch 2.11 would compile again for each plan that it sees
def _attend_documents_of(ctx: TokenContext, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    plan = ctx.segments()
    assert plan is not None
    return attend_documents(q, k, v, plan, *rest)


@not_compiled  # within a compiled block it is compiled by itself
def _attend_by_flex(
    ctx: TokenContext, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *rest: Any
) -> Tensor:
    blocks = ctx.once(("blocks", id(mask)), lambda: dense_blocks(mask))
    return attend_flex(q, k, v, blocks, *rest)


class RotaryMixer(FromConfig, WithPoints):
    """A mixer with rotary positions, whose tables are computed once per forward and passed to all layers in ctx."""

    attend: Attend
    spec: AttentionSpec
    rotary_dim: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    mrope: MRopeConfig | None = None

    def prepare(
        self, ctx: TokenContext, x: Tensor, cache: LayerCache | None = None
    ) -> Tables | None:
        """Return the rotary tables for x (B, S, M), None without rotated dims; compute the inputs of `attend`.

        Both are computed once per context for all layers alike: by Transformer before its first block, so that
        compiled blocks only read, or by a layer that is called by itself. ValueError where a `ctx.mask` meets an `attend`
        of other code.
        """
        if ctx.mask is not None:
            if not getattr(self.attend, "takes_mask", False):
                rule = f"of the context is not computed by {type(self.attend).__name__}"
                fix = "use attention in one process (cp = 1), or a model without such a mask"
                raise invalid("mask", "unsupported", ..., rule, fix)
            ctx.mask.prepare(self.spec, x)

        prepare_attend: Any = getattr(self.attend, "prepare", None)
        if prepare_attend is None or cache is not None:
            ctx.segments()
        else:
            prepare_attend(ctx, x)

        if self.rotary_dim == 0:
            return None
        # by the settings, not by the layer: layers of one type share a table
        return ctx.once(
            ("rope", self.rotary_dim, self.rope_theta, self.rope_scaling, self.mrope, x.device),
            lambda: self._rope_tables(ctx, x, cache),
        )

    def _rope_tables(self, ctx: TokenContext, x: Tensor, cache: LayerCache | None) -> Tables:
        """Cosines and sines (B or 1, S, 1, D / 2) fp32 of the positions of a context."""
        positions = ctx.positions
        if positions is None:
            past, first = (0, None) if cache is None else cache.first(ctx, *x.shape[:2])
            positions = default_positions(x.size(1), ctx.document_ids, x.device, past, first)
        if positions.dim() == 3:  # (B, 3, S); without `mrope` the model's `context` raises
            assert self.mrope is not None
            positions = self.mrope.by_pair(positions)
        frequencies = inverse_frequencies(
            self.rotary_dim, self.rope_theta, self.rope_scaling, x.device
        )
        return rope_tables(positions, frequencies, attention_factor(self.rope_scaling))


class Attention(RotaryMixer):
    """Causal self-attention of a decoder block.

        attention = Attention(dim=256, num_heads=8, num_kv_heads=2)
        attention(x)                  # (B, S, M) -> (B, S, M), each sequence is a single document
        attention(x, ctx, cache)      # packed documents, positions, a LayerCache

    Keywords are the fields of `TransformerConfig` about attention, `device` and `dtype`; `Attention(config)` takes a
    config. `q_proj` (M -> H D), `k_proj` and `v_proj` (M -> K D) and `o_proj` (H D -> M) are linear layers.
    `spec` is what is computed between the projections (default: `config.attention`). A config with a layer_pattern
    must be that of one layer, `config.of_layer(layer)`. The number of heads is read off the projections' outputs, so
    heads may be sharded over ranks.

    `attend(q, k, v, ctx)` computes the attention between the projections where there is no cache. It is no part of the
    state, and may be replaced by another callable of the same shapes (tokens of a sequence sharded over ranks, a kernel
    of your own). It finds all about tokens in ctx. If it has `prepare(ctx, x)`, that runs before the first block,
    outside compiled code. With sinks they are a fifth argument, (H,). If it has a `spec`, code that replaces it
    (context parallelism) raises for a spec that it does not compute.
    """

    attend: Attend
    points = ("q", "k", "v", "head_out")

    @config_arguments(CONFIG, vocab_size=1)
    def __init__(self, config: TransformerConfig, spec: AttentionSpec | None = None) -> None:
        super().__init__()
        if config.layer_pattern:
            rule = "has layers of several types, and Attention takes one"
            fix = "give it the config of one, config.of_layer(layer)"
            raise invalid("layer_pattern", "several", config.layer_pattern, rule, fix)
        self.spec = config.as_standard().attention if spec is None else spec
        self.head_dim, self.rotary_dim = config.resolved_head_dim, config.rotary_dim
        self.rope_theta, self.rope_scaling = config.rope_theta, config.rope_scaling
        self.mrope = config.mrope

        heads, kv_heads = config.num_heads, config.resolved_num_kv_heads
        width, kv_width = heads * self.head_dim, kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.dim, width, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.dim, kv_width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.dim, kv_width, bias=config.qkv_bias)
        self.o_proj = nn.Linear(width, config.dim, bias=config.o_bias)

        self.norms_heads = config.qk_norm_over == "head"
        widths = (self.head_dim, self.head_dim) if self.norms_heads else (width, kv_width)
        self.q_norm = build_head_norm(config, widths[0]) if config.qk_norm else None
        self.k_norm = build_head_norm(config, widths[1]) if config.qk_norm else None
        self.sinks = nn.Parameter(torch.zeros(heads)) if self.spec.sinks else None
        self.attend = LocalAttention(self.spec)

    def reset_parameters(self) -> None:
        """Draw initial values, also after `to_empty`: those of its layers, and 0 for sinks; see `forge_core.initialize`."""
        reset_children(self)
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    def extra_repr(self) -> str:
        heads, kv_heads = (p.out_features // self.head_dim for p in (self.q_proj, self.k_proj))
        return f"num_heads={heads}, num_kv_heads={kv_heads}, head_dim={self.head_dim}"

    def forward(
        self, x: Tensor, ctx: TokenContext | None = None, cache: LayerCache | None = None
    ) -> Tensor:
        """Project, norm heads, rotate, attend (also to cached tokens), and project out: (B, S, M) -> (B, S, M)."""
        ctx = TokenContext() if ctx is None else ctx
        out = self.between(x, *self.project(x), ctx, cache)
        return self.o_proj(out)  # (B, S, M)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project x (..., M) to normed queries (..., H, D), keys and values (..., K, D), not rotated yet."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        # over all heads of a token (OLMoE), or below over each head (Qwen3)
        if self.q_norm is not None and self.k_norm is not None and not self.norms_heads:
            q, k = self.q_norm(q), self.k_norm(k)
        q = q.unflatten(-1, (-1, self.head_dim))  # (..., H, D)
        k = k.unflatten(-1, (-1, self.head_dim))  # (..., K, D)
        v = v.unflatten(-1, (-1, self.head_dim))  # (..., K, D)
        if self.q_norm is not None and self.k_norm is not None and self.norms_heads:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def between(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        ctx: TokenContext,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Rotate and attend: q (B, S, H, D), k and v (B, S, K, D) of x (B, S, M) -> (B, S, H * D)."""
        tables = self.prepare(ctx, x, cache)
        if tables is not None:
            q, k = rotate(q, tables), rotate(k, tables)
        q, k, v = self.point("q", q), self.point("k", k), self.point("v", v)
        sinks = () if self.sinks is None else (self.sinks,)
        if cache is None:
            out = self.attend(q, k, v, ctx, *sinks)
        else:
            out = cache.attend(q, k, v, ctx, self.spec, *sinks)
        return self.point("head_out", out).flatten(-2)

    def init_table(self, std: float, residual_std: float) -> dict[str, Init]:
        """Initial values by local name; norms set their own."""
        return {
            **linear_rows("q_proj", self.q_proj, std),
            **linear_rows("k_proj", self.k_proj, std),
            **linear_rows("v_proj", self.v_proj, std),
            **linear_rows("o_proj", self.o_proj, residual_std),
            **({} if self.sinks is None else {"sinks": Init("normal", std)}),
        }

    def parallel_roles(self) -> dict[str, Any]:
        """Role of each parameter under tensor parallelism, by pattern; see Transformer."""
        norms: dict[str, Any] = {}
        if self.q_norm is not None and self.norms_heads:
            norms = {"q_norm.*": "replicate_sum_grad", "k_norm.*": "replicate_sum_grad"}
        elif self.q_norm is not None:
            norms = {"q_norm.*": "norm_over_heads", "k_norm.*": ("norm_over_heads", 1, True)}
        return {
            "q_proj.*": "colwise",
            "k_proj.*": "shared_heads",
            "v_proj.*": "shared_heads",
            "o_proj.*": "rowwise",
            **norms,
            **({} if self.sinks is None else {"sinks": "by_heads"}),
        }

    def flops_per_token(self, seq_len: int) -> float:
        """Forward FLOPs for one token in sequences of `seq_len`: projections, scores and values.

        A token sees seq_len / 2 tokens on average (causal), so scores and values take
        2 * 2 * H * D * seq_len / 2; less with a window. Packed documents need less than this.
        """
        projections = linear_flops(self.q_proj, self.k_proj, self.v_proj, self.o_proj)
        return projections + 2.0 * self.q_proj.out_features * tokens_seen(seq_len, self.spec.window)


def tokens_seen(seq_len: int, window: int | None) -> float:
    """Twice the number of tokens that one sees on average in a causal sequence."""
    reach = min(window or seq_len, seq_len)
    return reach * (2 * seq_len - reach) / seq_len
