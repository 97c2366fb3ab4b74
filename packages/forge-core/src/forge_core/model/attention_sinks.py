"""Attention with sinks from flash kernels that have none: no scores are held.

A sink s of a head is one more score in the softmax, and has no value (gpt-oss). With the log-sum-exp l of a token's scores, that of
scores and sink is m = log(e^l + e^s). The output is the kernel's times e^(l - m). Given this output and m, the kernel's
backward takes e^(score - m) for the weights, which are those of the softmax with the sink; so its gradients are exact.
The sink's own is -e^(s - m) (grad . output), summed over tokens.

Shapes: B sequences, S tokens, H query heads, K key/value heads, D width of a head, T tokens of all sequences.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge_core._shared.flash import (
    Boundaries,
    flash_cpu,
    flash_cpu_backward,
    flash_varlen,
    flash_varlen_backward,
)


def sdpa_with_sinks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """`attention_ops.sdpa` with sinks (H,), by the flash kernel of CPUs: q (B, H, S, D), k and v (B, K, T, D) -> like q.

    Keys and values are repeated to H heads. attn_mask (S, T) bool: each token must see one at least.
    """
    groups = q.size(1) // k.size(1)
    k, v = (t.to(q.dtype).repeat_interleave(groups, dim=1) for t in (k, v))  # (B, H, T, D)
    if attn_mask is not None:  # the kernel adds its mask to scores
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill(~attn_mask, -torch.inf)
    out: Tensor = _Sinks.apply(q, k, v, sinks, scale, is_causal, attn_mask, None, 0, None)
    return out


def varlen_with_sinks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """`_torch_compat.varlen` with sinks (H,), causal: q (T, H, D), k and v (T, K, D) -> like q. CUDA, 16-bit only."""
    heads = (t.transpose(0, 1) for t in (q, k, v))  # (H or K, T, D), views
    out: Tensor = _Sinks.apply(*heads, sinks, scale, True, None, cu_seqlens, longest, window)
    return out.transpose(0, 1)


class _Sinks(torch.autograd.Function):
    """q (..., H, S, D), sinks (H,) -> like q; with cu_seqlens one call of the varlen kernel, else of that of CPUs."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor,
        scale: float | None,
        causal: bool,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
        longest: int,
        window: int | None,
    ) -> Tensor:
        if cu_seqlens is None:
            found, lse = flash_cpu(q, k, v, causal, mask, scale)
        else:
            runs = Boundaries(cu_seqlens, cu_seqlens, longest, longest)
            tokens = [t.transpose(0, 1) for t in (q, k, v)]  # (T, H or K, D)
            found, lse = flash_varlen(tokens[0], tokens[1], tokens[2], runs, causal, window, scale)
            found = found.transpose(0, 1)  # (H, T, D)

        total = torch.logaddexp(lse, sinks.to(lse.dtype).unsqueeze(-1))  # (..., H, S)
        kept = (lse - total).exp().unsqueeze(-1)
        if torch.compiler.is_compiling():  # which fuses, and takes no `out`
            out = (found * kept).to(q.dtype)
        else:  # in one kernel without a tensor in fp32; not in place: selective recomputation keeps `found`
            out = torch.mul(found, kept, out=torch.empty_like(found))
        ctx.save_for_backward(q, k, v, sinks, out, total, mask, cu_seqlens)
        ctx.settings = scale, causal, longest, window
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, total, mask, cu_seqlens = ctx.saved_tensors
        scale, causal, longest, window = ctx.settings
        if grad.stride(-1) != 1:  # kernels do not accept an expanded gradient, as of a sum
            grad = grad.contiguous()

        if cu_seqlens is None:
            found = flash_cpu_backward(grad, q, k, v, out, total, causal, mask, scale)
        else:
            runs = Boundaries(cu_seqlens, cu_seqlens, longest, longest)
            flat = [t.transpose(0, 1) for t in (grad, q, k, v, out)]  # (T, H or K, D)
            dq, dk, dv = flash_varlen_backward(
                flat[0], flat[1], flat[2], flat[3], flat[4], total, runs, causal, window, scale
            )
            found = dq.transpose(0, 1), dk.transpose(0, 1), dv.transpose(0, 1)

        grad_sinks = None
        if ctx.needs_input_grad[3]:
            delta = (grad.to(total.dtype) * out).sum(-1)  # (..., H, S)
            taken = (sinks.to(total.dtype).unsqueeze(-1) - total).exp() * delta
            grad_sinks = -taken.sum(-1).reshape(-1, len(sinks)).sum(0).to(sinks.dtype)
        return (*found, grad_sinks, *(None,) * 6)
