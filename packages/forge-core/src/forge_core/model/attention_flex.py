"""Attention of FlexAttention on GPUs: soft-caps, and masks of one's own, without a tensor of scores.

A block mask names the blocks of 128 queries and 128 keys that have a pair who see each other; others cost nothing.

Shapes: B sequences, S tokens, H query heads, K key/value heads, D width of a head, N blocks of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forge_core._torch_compat import has_triton, without_modes

if TYPE_CHECKING:
    from forge_core.model.attention_ops import AttentionSpec

#: Queries, and keys, of a block.
BLOCK = 128


def flex_computes(q: Tensor) -> bool:
    """Whether FlexAttention has forward and backward kernels for q (..., D): on CUDA with Triton, from 16 dims on."""
    return q.is_cuda and q.size(-1) >= 16 and has_triton()


def causal_blocks(segments: Tensor | None, size: int, window: int | None, device: Any) -> Any:
    """The block mask of causal attention inside of segments and a window; no wait, and nothing of S x S.

    segments (B, S): the number of each token's segment, which rises; None: each sequence is one.
    """
    ids = torch.zeros(1, size, dtype=torch.int64, device=device) if segments is None else segments
    blocks = -(-size // BLOCK)
    first = torch.arange(blocks, device=device) * BLOCK
    last = (first + BLOCK - 1).clamp(max=size - 1)

    # of the pairs of two blocks the nearest are the first query and the last key: they see each other if any do; the
    # farthest are the last query and the first key: all see each other if these do
    earlier = first[:, None] > first[None, :]
    nearest, farthest = first[:, None] - last, last[:, None] - first  # (N, N)
    seen = earlier & (ids[:, first, None] == ids[:, None, last])  # (B, N, N)
    full = earlier & (ids[:, last, None] == ids[:, None, first])
    if window is not None:
        seen, full = seen & (nearest < window), full & (farthest < window)
    seen = seen | torch.eye(blocks, dtype=torch.bool, device=device)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        found = query >= key
        if window is not None:
            found = found & (query - key < window)
        return (
            found if segments is None else found & (segments[batch, query] == segments[batch, key])
        )

    return block_mask(seen, full, sees, size)


def dense_blocks(mask: Tensor) -> Any:
    """The block mask of a mask (B or 1, 1, S, S) bool, which it holds."""
    size = mask.size(-1)
    spare = -size % BLOCK
    tiles = (
        F.pad(mask[:, 0], (0, spare, 0, spare)).unflatten(1, (-1, BLOCK)).unflatten(3, (-1, BLOCK))
    )
    # padded pairs are outside of all: a last block that is not whole is never full
    seen, full = tiles.any(4).any(2), tiles.all(4).all(2)  # (B, N, N)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return mask[0 if len(mask) == 1 else batch, 0, query, key]

    return block_mask(seen, full, sees, size)


def block_mask(seen: Tensor, full: Tensor, sees: Callable[..., Tensor], size: int) -> Any:
    """FlexAttention's mask from blocks (B, N, N) bool that have a pair that is seen, or no other, and the rule for pairs of the former."""
    from torch.nn.attention.flex_attention import BlockMask

    mixed, mixed_indices = _listed(seen & ~full)
    number, indices = _listed(full)
    rest: Any = {"BLOCK_SIZE": BLOCK, "mask_mod": sees, "seq_lengths": (size, size)}
    return BlockMask.from_kv_blocks(mixed, mixed_indices, number, indices, **rest)


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks (B, N, N) bool each query block has, (B, 1, N), and their numbers first in (B, 1, N, N); int32."""
    chosen = blocks.unsqueeze(1).to(torch.int32)
    order = chosen.argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), order.to(torch.int32)


def attend_flex(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, spec: AttentionSpec, sinks: Tensor | None = None
) -> Tensor:
    """Attention under a block mask with the scale, soft-cap and sinks of a spec: q (B, S, H, D), k and v (B, S, K, D) ->
    like q; values may have another width.

    On the CPU it has no backward. Selective recomputation computes it again.
    """
    from torch.nn.attention.flex_attention import AuxRequest

    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, H or K, S, D)
    options = {"block_mask": mask, "scale": spec.scale, "enable_gqa": q.size(1) != k.size(1)}
    if spec.softcap is not None:
        options["score_mod"] = _capped(spec.softcap)
    plain = torch.compiler.is_compiling() or q.device.type == "cpu"
    flex = _flex(plain)
    # a mode that sees each operator would keep it from being compiled
    with nullcontext() if plain else without_modes():
        if sinks is None or not spec.sinks:
            out: Tensor = flex(q, k, v, **options)
            return out.transpose(1, 2)

        # as attention_sinks: e^l / (e^l + e^s) of the output without sinks
        out, found = flex(q, k, v, **options, return_aux=AuxRequest(lse=True))
        kept = (found.lse - sinks.to(found.lse.dtype)[:, None]).sigmoid()  # (B, H, S)
        return (out * kept.unsqueeze(-1)).to(out.dtype).transpose(1, 2)


def _capped(softcap: float) -> Callable[..., Tensor]:
    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


@cache
def _flex(plain: bool) -> Any:
    """FlexAttention; by itself it would hold all scores, so outside of compiled code it is compiled."""
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention if plain else torch.compile(flex_attention, dynamic=False)
