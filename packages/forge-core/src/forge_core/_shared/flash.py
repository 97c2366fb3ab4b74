# Copied from scripts/shared/flash.py; edit that file, then run scripts/copy_shared.py.
"""Torch's flash kernels with their log-sum-exp, forward and backward: one text for the packages that change either.

The backward takes any output and log-sum-exp that hold these keys, and others (ring attention) or a sink.

Shapes: N sequences, H query heads, K key/value heads, L tokens, D width of a head; T tokens of sequences laid end to end.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Boundaries(NamedTuple):
    """Cumulative lengths of queries and of keys, int32 on the device, and the longest of each."""

    queries: Tensor
    keys: Tensor
    longest: int
    most: int


def flash_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention (N, H, L, D) and its log-sum-exp (N, H, L) on the CPU; mask (..., L, L) is added to scores."""
    call = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = call(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    return out, lse


def flash_cpu_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v (N, H, L, D) for any out and lse that hold these keys."""
    call = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    dq, dk, dv = call(grad, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale)
    return dq, dk, dv


def flash_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    boundaries: Boundaries,
    causal: bool,
    window: int | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention (T, H, D) of concatenated sequences, and its log-sum-exp (H, T): CUDA, 16 bits, D a multiple of 8 to 256.

    k and v (T, K, D) may have fewer heads. The call is that of torch 2.13's own varlen_attn. Numbers of it were never seen:
    they need a GPU.
    """
    call = torch.ops.aten._flash_attention_forward
    arguments = _varlen_arguments(q, k, v, boundaries, causal, window, scale)
    out, lse, *_ = call(**arguments, return_debug_mask=False)
    return out, lse


def flash_varlen_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    boundaries: Boundaries,
    causal: bool,
    window: int | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `flash_varlen` for any out and lse that hold these keys. As there, never seen on a GPU."""
    dropout = {
        "rng_state": torch.zeros(2, dtype=torch.uint64, device=q.device),
        "unused": q.new_empty(0),
    }
    found = {"grad_out": grad, "out": out, "logsumexp": lse}
    arguments = _varlen_arguments(q, k, v, boundaries, causal, window, scale)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(**found, **arguments, **dropout)
    return dq, dk, dv


def _varlen_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    boundaries: Boundaries,
    causal: bool,
    window: int | None,
    scale: float | None,
) -> dict[str, Any]:
    """The arguments of both flash kernels by name: 2.11 to 2.15 have the same names, and more arguments in new places.

    A version that renames one raises an error in the call, where a position would take another value in silence.
    """
    queries, keys, longest, most = boundaries
    lengths = {"cum_seq_q": queries, "cum_seq_k": keys, "max_q": longest, "max_k": most}
    found = {"query": q, "key": k, "value": v, **lengths, "dropout_p": 0.0, "is_causal": causal}
    if window is not None:  # tokens to the left; the kernel's own causal switch would leave it out
        found |= {"is_causal": False, "window_size_left": window - 1, "window_size_right": 0}
    return found if scale is None else found | {"scale": scale}
