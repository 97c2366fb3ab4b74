"""Attention of whole rows, each a single document, for every field of an AttentionSpec.

Shapes: B rows, S tokens, T keys, H query heads, K key/value heads, D width of a head, W window, N pieces.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forge_core._torch_compat import constant_when_compiled
from forge_core.model.spec import AttentionSpec

PLAIN = AttentionSpec()


def attend_rows(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec = PLAIN, sinks: Tensor | None = None
) -> Tensor:
    """Causal attention of whole rows: q (B, S, H, D), k and v (B, S, K, D), sinks (H,) -> (B, S, H, D).

    A fused kernel computes scale and window, without a mask of (S, S); softcap and sinks hold the scores.
    """
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    if spec.needs_scores:
        index = torch.arange(q.size(2), device=q.device)
        out = attend_scores(q, k, v, visible(index, index, spec.window), spec, sinks)
    elif spec.window is not None and spec.window < q.size(2):
        out = _windowed(q, k, v, spec.window, spec.scale)
    else:
        out = sdpa(q, k, v, is_causal=True, scale=spec.scale)
    return out.transpose(1, 2)


def visible(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """(queries, keys) bool: True where a token at one index sees that at another."""
    ahead = queries[:, None] - keys[None, :]
    return ahead >= 0 if window is None else (ahead >= 0) & (ahead < window)


def attend_masked(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, spec: AttentionSpec, sinks: Tensor | None
) -> Tensor:
    """Attention to the tokens that a mask (..., S, T) allows: q (B, H, S, D), k, v (B, K, T, D) -> like q."""
    if spec.needs_scores:
        return attend_scores(q, k, v, mask, spec, sinks)
    return sdpa(q, k, v, attn_mask=mask, scale=spec.scale)


def attend_scores(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, spec: AttentionSpec, sinks: Tensor | None
) -> Tensor:
    """The same from its definition, in fp32 at least; holds (B, H, S, T) scores, for the backward too."""
    weights = score_weights(q, k, mask, spec, sinks)
    values = v.to(weights.dtype).repeat_interleave(q.size(1) // v.size(1), dim=1)  # (B, H, T, D)
    return (weights @ values).to(q.dtype)


def score_weights(
    q: Tensor, k: Tensor, mask: Tensor | None, spec: AttentionSpec, sinks: Tensor | None
) -> Tensor:
    """What each query takes of each value: q (B, H, S, D), k (B, K, T, D) -> (B, H, S, T), fp32 at least."""
    return softmax_scores(scaled_products(q, k, spec), mask, spec, sinks)


def scaled_products(q: Tensor, k: Tensor, spec: AttentionSpec) -> Tensor:
    """Scores before soft-cap and mask: q (B, H, S, D), k (B, K, T, D) -> (B, H, S, T), fp32 at least."""
    wide = torch.promote_types(q.dtype, torch.float32)
    keys = k.to(wide).repeat_interleave(q.size(1) // k.size(1), dim=1)  # (B, H, T, D)
    scale = q.size(-1) ** -0.5 if spec.scale is None else spec.scale
    return q.to(wide) @ keys.mT * scale  # (B, H, S, T)


def softmax_scores(
    scores: Tensor, mask: Tensor | None, spec: AttentionSpec, sinks: Tensor | None
) -> Tensor:
    """Weights of scores (B, H, S, T): soft-cap, mask, sinks, softmax."""
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), dim=-1)  # (B, H, S, T + 1)
    weights = scores.softmax(-1)
    return weights if sinks is None else weights[..., :-1]


def sdpa(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Attention with shared key/value heads: q (B, H, S, D), k and v (B, K, T, D) -> like q.

    `options` are those of `F.scaled_dot_product_attention`. On CUDA keys and values are repeated to H heads in fp32,
    where only torch's math kernel shares heads, and holds (S, T) scores of every head; and where its memory-efficient
    kernel alone is allowed, which refuses shared heads.
    """
    groups = q.size(1) // k.size(1)
    if groups > 1 and q.is_cuda and (q.dtype == torch.float32 or not _shared_by_a_kernel()):
        k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))  # (B, H, T, D)
        groups = 1
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=groups > 1, **options)


# Dynamo cannot read the switches, which last as long as a model
@constant_when_compiled
def _shared_by_a_kernel() -> bool:
    """Whether torch may take a kernel that shares key/value heads: flash and cuDNN, which have 16 bits, and math."""
    cuda = torch.backends.cuda
    return cuda.flash_sdp_enabled() or cuda.math_sdp_enabled() or cuda.cudnn_sdp_enabled()


def _windowed(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float | None) -> Tensor:
    """Pieces of W queries, each with its own W keys and those of the piece before: shapes as `sdpa`.

    The mask is (W, 2 W) whatever the row's length; keys and values are copied once more.
    """
    size = q.size(2)
    whole = size // window  # pieces of W tokens, at least 1
    out = [sdpa(*(t[:, :, :window] for t in (q, k, v)), is_causal=True, scale=scale)]
    query = torch.arange(window, 2 * window, device=q.device)
    mask = visible(query, torch.arange(2 * window, device=q.device), window)  # (W, 2 W)
    if whole > 1:
        pieces = [t[:, :, : whole * window].unflatten(2, (whole, window)) for t in (q, k, v)]
        queries = _merge_pieces(pieces[0][:, :, 1:])  # (B N, H, W, D)
        keys, values = (
            _merge_pieces(torch.cat((t[:, :, :-1], t[:, :, 1:]), dim=3)) for t in pieces[1:]
        )
        later = sdpa(queries, keys, values, attn_mask=mask, scale=scale)
        out.append(later.unflatten(0, (q.size(0), -1)).transpose(1, 2).flatten(2, 3))
    rest = size - whole * window
    if rest:
        keys, values = (t[:, :, (whole - 1) * window :] for t in (k, v))
        last = mask[:rest, : window + rest]
        out.append(sdpa(q[:, :, whole * window :], keys, values, attn_mask=last, scale=scale))
    return torch.cat(out, dim=2)


def _merge_pieces(x: Tensor) -> Tensor:
    """(B, H, N, L, D) -> (B N, H, L, D)."""
    return x.transpose(1, 2).flatten(0, 1)
