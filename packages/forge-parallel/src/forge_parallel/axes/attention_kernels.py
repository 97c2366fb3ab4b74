"""Attention kernels for a batch of tiles: output and log-sum-exp, and the backward from merged ones.

Shapes: N tiles of Lq queries and Lk keys, H query heads, K key/value heads, D width of a head. A ragged kernel
takes tiles of any lengths, concatenated with N = 1, and their borders from the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forge_parallel._torch_compat import (
    flash_cpu,
    flash_cpu_backward,
    flash_varlen,
    flash_varlen_backward,
)
from forge_parallel.axes.tiles import TileBatch


class Kernel(NamedTuple):
    """forward(q, k, v, group) -> out, lse; backward(grad, q, out, lse, k, v, group) -> dq, dk, dv."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    ragged: bool


def kernel_for(q: Tensor) -> Kernel:
    """Flash where there is a kernel for the device, dtype and width of q (B, S, H, D)."""
    if q.dtype != torch.float64 and q.device.type == "cpu":
        return _FLASH_CPU
    short = q.dtype in (torch.float16, torch.bfloat16)
    flash = short and q.is_cuda and q.size(3) % 8 == 0 and q.size(3) <= 256
    return _FLASH_VARLEN if flash else _PLAIN


def _repeated(x: Tensor, heads: int) -> Tensor:
    """(N, L, K, D) -> (N, H, L, D)."""
    x = x if x.size(2) == heads else x.repeat_interleave(heads // x.size(2), dim=2)
    return x.transpose(1, 2)


def _folded(grad: Tensor, kv_heads: int) -> Tensor:
    """(N, H, L, D) -> (N, L, K, D): the gradient of repeated heads is summed."""
    grad = grad.transpose(1, 2)
    if grad.size(2) == kv_heads:
        return grad
    return grad.unflatten(2, (kv_heads, -1)).sum(
        3, dtype=torch.promote_types(grad.dtype, torch.float32)
    )


def _by_heads(forward: Callable[..., Any], backward: Callable[..., Any]) -> Kernel:
    """The kernel of functions on (N, H, L, D) whose keys and values have as many heads as queries."""

    def run(q: Tensor, k: Tensor, v: Tensor, group: TileBatch) -> tuple[Tensor, Tensor]:
        keys, values = (_repeated(t, q.size(2)) for t in (k, v))
        out, lse = forward(q.transpose(1, 2), keys, values, group.causal)
        return out.transpose(1, 2), lse.transpose(1, 2)

    def run_back(
        grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, group: TileBatch
    ) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = (_repeated(t, q.size(2)) for t in (k, v))
        grad, q, out, lse = (t.transpose(1, 2) for t in (grad, q, out, lse))
        dq, dk, dv = backward(grad, q, keys, values, out, lse, group.causal)
        return dq.transpose(1, 2), _folded(dk, k.size(2)), _folded(dv, k.size(2))

    return Kernel(run, run_back, ragged=False)


def _scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """Scaled scores (N, H, Lq, Lk), at least in fp32."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ k.to(wide).mT * q.size(-1) ** -0.5
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, causal)
    return scores.softmax(-1) @ v.to(scores.dtype), scores.logsumexp(-1)


def _plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    weights = (_scores(q, k, causal) - lse.unsqueeze(-1)).exp()
    grad, q, k, v, out = (t.to(weights.dtype) for t in (grad, q, k, v, out))
    slope = grad @ v.mT - (grad * out).sum(-1, keepdim=True)
    slope = weights * slope * q.size(-1) ** -0.5
    return slope @ k, slope.mT @ q, weights.mT @ grad


def _flat(x: Tensor) -> Tensor:
    return x.flatten(0, 1)  # (T, H, D)


def _varlen_forward(q: Tensor, k: Tensor, v: Tensor, group: TileBatch) -> tuple[Tensor, Tensor]:
    borders = group.borders(q.size(0), q.device)
    out, lse = flash_varlen(_flat(q), _flat(k), _flat(v), borders, group.causal)
    return out.view(q.shape), lse.t().unflatten(0, q.shape[:2])


def _varlen_backward(
    grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, group: TileBatch
) -> tuple[Tensor, Tensor, Tensor]:
    borders, sums = group.borders(q.size(0), q.device), lse.flatten(0, 1).t().contiguous()
    dq, dk, dv = flash_varlen_backward(
        _flat(grad), _flat(q), _flat(k), _flat(v), _flat(out), sums, borders, group.causal
    )
    return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)


_FLASH_CPU = _by_heads(flash_cpu, flash_cpu_backward)
_FLASH_VARLEN = Kernel(_varlen_forward, _varlen_backward, ragged=True)
_PLAIN = _by_heads(_plain_forward, _plain_backward)
