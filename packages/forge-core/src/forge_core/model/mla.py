"""Multi-head latent attention (DeepSeek-V2, 2024): keys and values of all heads come from one narrow latent.

Shapes: B sequences, S tokens, M width of the residual stream, H heads, N dims of a head that do not rotate, R dims that
do, V width of a value, L width of the latent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_core._config import size_problems, switch_problems
from forge_core._shared.fields import field
from forge_core._shared.module_arguments import config_arguments
from forge_core._shared.problems import Problem, raise_problems
from forge_core.flops import linear_flops
from forge_core.model.attention import CONFIG, Attend, LocalAttention, RotaryMixer, tokens_seen
from forge_core.model.context import TokenContext
from forge_core.model.init import Init, linear_rows, reset_children
from forge_core.model.kv_cache import LayerCache
from forge_core.model.norm import RMSNorm
from forge_core.model.rope import rotate, score_factor

if TYPE_CHECKING:
    from forge_core.model.config import TransformerConfig

#: In the norms of latents, whatever the other norms have, as in DeepSeek's reference code.
_NORM_EPS = 1e-6


@dataclass(frozen=True)
class MLAConfig:
    """Widths of multi-head latent attention (DeepSeek-V2, 2024), by Hugging Face's names; defaults are DeepSeek-V3's.

    MLAConfig(q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)
    """

    q_lora_rank: int | None = field(
        None, "width of the latent that queries come from; empty: they come from the stream"
    )
    kv_lora_rank: int = field(512, "width of the latent that keys and values come from")
    qk_nope_head_dim: int = field(128, "dims of a query's and a key's head that do not rotate")
    qk_rope_head_dim: int = field(64, "dims that rotate, which the keys of all heads share")
    v_head_dim: int = field(128, "width of a value's head")
    rope_interleave: bool = field(
        False, "dims rotate in pairs of neighbors (DeepSeek's weights), not of halves"
    )

    def __post_init__(self) -> None:
        raise_problems("mla", _width_problems(self))

    @property
    def qk_head_dim(self) -> int:
        """Width of a query's and a key's head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


def _width_problems(c: MLAConfig) -> Iterator[Problem]:
    widths = ["q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"]
    sizes = list(size_problems(c, dict.fromkeys(widths, 2**16)))
    yield from sizes
    if not sizes and c.qk_rope_head_dim % 2:
        rule = "must be even: rotary embedding rotates pairs"
        yield Problem("qk_rope_head_dim", "even", c.qk_rope_head_dim, rule, "use 64")
    yield from switch_problems(c, "rope_interleave")


class UpProjection(nn.Linear):
    """A linear layer (B, S, L) -> (B, S, H (N + V)), or the result of `then(x, weight)` (decoding)."""

    def forward(self, x: Tensor, then: Callable[[Tensor, Tensor], Tensor] | None = None) -> Tensor:
        return super().forward(x) if then is None else then(x, self.weight)


class LatentAttention(RotaryMixer):
    """Causal self-attention from latents, as the mixer "mla".

        attention = LatentAttention(dim=256, num_heads=8, mla=MLAConfig(kv_lora_rank=64))
        attention(x)                  # (B, S, M) -> (B, S, M), each sequence is a single document
        attention(x, ctx, cache)      # packed documents, positions, a LayerCache

    Keywords are the fields of `TransformerConfig`, `device` and `dtype`; `LatentAttention(config)` takes a config.

    Without cached tokens, keys and values of every head are computed, and `attend` is used as in `Attention`: q, k and
    v (B, S, H, W) of one width, the narrower of q and v padded with zeros; an `attend` with `takes_narrow_values` true is
    given values of their own width, where that is the narrower. With cached tokens the projection from the latent is
    absorbed into queries and outputs instead: all heads attend to the same keys, the latents. A cache holds L + R
    elements per token, whatever the number of heads.

    Scores are scaled by (N + R) ** -0.5, or `config.attention.scale`, times YaRN's `score_factor`. `config.qkv_bias` is
    a bias in the projections to the latents.
    """

    attend: Attend
    points = ("q", "k", "v", "head_out")

    @config_arguments(CONFIG, vocab_size=1, mixer="mla")
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        c = self.widths = config.resolved_mla
        self.rotary_dim = int(c.qk_rope_head_dim * config.partial_rotary_factor)
        self.rope_theta, self.rope_scaling = config.rope_theta, config.rope_scaling
        scale = config.attention.scale or c.qk_head_dim**-0.5
        self.spec = replace(config.attention, scale=scale * score_factor(config.rope_scaling))

        heads, bias = config.num_heads, config.qkv_bias
        queries = heads * c.qk_head_dim
        if c.q_lora_rank is None:
            self.q_proj = nn.Linear(config.dim, queries, bias=False)
        else:
            self.q_a_proj = nn.Linear(config.dim, c.q_lora_rank, bias=bias)
            self.q_a_norm = RMSNorm(c.q_lora_rank, _NORM_EPS)
            self.q_b_proj = nn.Linear(c.q_lora_rank, queries, bias=False)

        self.kv_a_proj = nn.Linear(config.dim, c.kv_lora_rank + c.qk_rope_head_dim, bias=bias)
        self.kv_a_norm = RMSNorm(c.kv_lora_rank, _NORM_EPS)
        up = heads * (c.qk_nope_head_dim + c.v_head_dim)
        self.kv_b_proj = UpProjection(c.kv_lora_rank, up, bias=False)
        # a module, so that tensor parallelism can hand the shared dims to the heads of all ranks by a hook
        self.k_rope = nn.Identity()
        self.o_proj = nn.Linear(heads * c.v_head_dim, config.dim, bias=config.o_bias)
        self.attend = LocalAttention(self.spec)

    def reset_parameters(self) -> None:
        """Draw initial values of its layers, also after `to_empty`; see `forge_core.initialize`."""
        reset_children(self)

    def extra_repr(self) -> str:
        c = self.widths
        heads = self.o_proj.in_features // c.v_head_dim
        return f"num_heads={heads}, kv_lora_rank={c.kv_lora_rank}, qk_head_dim={c.qk_head_dim}"

    def forward(
        self, x: Tensor, ctx: TokenContext | None = None, cache: LayerCache | None = None
    ) -> Tensor:
        ctx = TokenContext() if ctx is None else ctx
        tables, c = self.prepare(ctx, x, cache), self.widths
        queries = (
            self.q_proj(x)
            if c.q_lora_rank is None
            else self.q_b_proj(self.q_a_norm(self.q_a_proj(x)))
        )
        q = queries.unflatten(-1, (-1, c.qk_head_dim))  # (B, S, H, N + R)
        q_plain, q_rotated = q.split((c.qk_nope_head_dim, c.qk_rope_head_dim), dim=-1)

        latent, k_rotated = self.kv_a_proj(x).split((c.kv_lora_rank, c.qk_rope_head_dim), dim=-1)
        latent = self.kv_a_norm(latent)  # (B, S, L)
        k_rotated = self.k_rope(k_rotated).unsqueeze(2)  # (B, S, 1, R)
        if tables is not None:
            q_rotated, k_rotated = (
                rotate(self._in_halves(t), tables) for t in (q_rotated, k_rotated)
            )

        # else keys and values of all heads would be computed again from all cached latents in each step
        if cache is not None and cache.length:

            def absorbed(latent: Tensor, weight: Tensor) -> Tensor:
                return self._absorbed(q_plain, q_rotated, latent, k_rotated, weight, ctx, cache)

            out = self.kv_b_proj(latent, then=absorbed)  # (B, S, H, V)
        else:
            q = torch.cat((q_plain, q_rotated), dim=-1)
            out = self._expanded(q, latent, k_rotated, ctx, cache)
        out = self.point("head_out", out)
        return self.o_proj(out.flatten(-2))  # (B, S, M)

    def _in_halves(self, x: Tensor) -> Tensor:
        """Pairs of neighbors become pairs of halves; scores do not depend on the order of dims."""
        if not self.widths.rope_interleave:
            return x
        return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)

    def _expanded(
        self,
        q: Tensor,
        latent: Tensor,
        k_rotated: Tensor,
        ctx: TokenContext,
        cache: LayerCache | None,
    ) -> Tensor:
        """Attend to keys and values of every head: q (B, S, H, N + R), latent (B, S, L) -> (B, S, H, V)."""
        c = self.widths
        kv = self.kv_b_proj(latent).unflatten(-1, (-1, c.qk_nope_head_dim + c.v_head_dim))
        k_plain, v = kv.split((c.qk_nope_head_dim, c.v_head_dim), dim=-1)
        k = torch.cat((k_plain, k_rotated.expand(-1, -1, k_plain.size(2), -1)), dim=-1)
        q, k, v = self.point("q", q), self.point("k", k), self.point("v", v)
        # most fused kernels take one width: those of `attention_ops` pad values where it is needed
        short = c.v_head_dim - c.qk_head_dim
        if short > 0:
            q, k = F.pad(q, (0, short)), F.pad(k, (0, short))
        elif short and cache is None and not getattr(self.attend, "takes_narrow_values", False):
            v = F.pad(v, (0, -short))  # (B, S, H, width)
        if cache is None:
            out = self.attend(q, k, v, ctx)
        else:
            stored = _cache_entry(latent, k_rotated)
            out = cache.attend(q, k, v, ctx, self.spec, stored=(stored, stored))
        return out[..., : c.v_head_dim]

    def _absorbed(
        self,
        q_plain: Tensor,
        q_rotated: Tensor,
        latent: Tensor,
        k_rotated: Tensor,
        weight: Tensor,
        ctx: TokenContext,
        cache: LayerCache,
    ) -> Tensor:
        """Attend with all heads to the latents: q_plain (B, S, H, N), weight (H (N + V), L) -> (B, S, H, V).

        Scores q (W latent) are (q W) latent, and outputs sum(p W latent) are W sum(p latent).
        """
        c = self.widths
        per_head = weight.unflatten(0, (-1, c.qk_nope_head_dim + c.v_head_dim))  # (H, N + V, L)
        keys, values = per_head.split((c.qk_nope_head_dim, c.v_head_dim), dim=1)
        q = torch.cat((torch.einsum("bshn,hnl->bshl", q_plain, keys), q_rotated), dim=-1)
        stored = _cache_entry(latent, k_rotated)
        out = cache.attend(q, stored, stored, ctx, self.spec)  # (B, S, H, L + R)
        return torch.einsum("bshl,hvl->bshv", out[..., : c.kv_lora_rank], values)

    def _projections(self) -> dict[str, Any]:
        """The linear layers by name, or their replacements (LoRA, float8)."""
        return {name: m for name, m in self.named_children() if name.endswith("_proj")}

    def init_table(self, std: float, residual_std: float) -> dict[str, Init]:
        """Initial values by local name; norms set their own."""
        table: dict[str, Init] = {}
        for name, linear in self._projections().items():
            table |= linear_rows(name, linear, residual_std if name == "o_proj" else std)
        return table

    def parallel_roles(self) -> dict[str, Any]:
        """Role of each parameter under tensor parallelism, by pattern; see Transformer.

        Heads are sharded. Latents are computed from the tokens of a rank, and gathered for the heads of all ranks.
        """
        c = self.widths
        queries = {"role": "colwise", "multiple_of": c.qk_head_dim}
        if c.q_lora_rank is None:
            roles: dict[str, Any] = {"q_proj.*": queries}
        else:
            roles = {"q_a_proj.*": "sequence", "q_a_norm.*": "sequence", "q_b_proj.*": queries}
        return {
            **roles,
            **{"kv_a_proj.*": "sequence", "kv_a_norm.*": "sequence", "k_rope": "enter"},
            "kv_b_proj.*": {
                "role": "colwise",
                "multiple_of": c.qk_nope_head_dim + c.v_head_dim,
            },
            "o_proj.*": {"role": "rowwise", "multiple_of": c.v_head_dim},
        }

    def flops_per_token(self, seq_len: int) -> float:
        """Forward FLOPs for one token of a sequence of `seq_len`: projections, scores and values."""
        c = self.widths
        projections = linear_flops(*self._projections().values())
        heads = self.o_proj.in_features // c.v_head_dim
        return projections + heads * (c.qk_head_dim + c.v_head_dim) * tokens_seen(
            seq_len, self.spec.window
        )


def _cache_entry(latent: Tensor, k_rotated: Tensor) -> Tensor:
    """Content of a cache: latent (B, S, L) and rotated dims (B, S, 1, R) -> (B, S, 1, L + R)."""
    return torch.cat((latent.unsqueeze(2), k_rotated), dim=-1)
