"""Exact attention from rectangular tiles of the (query, key) square.

Each tile gives an output and the log-sum-exp of its scores. With both, tiles merge exactly; and with the merged
ones the backward of each tile gives its exact part of the gradients, on whatever rank the keys of other tiles are
(ring attention, Liu et al. 2023).

Shapes: B rows, S tokens of a row, H query heads, K key/value heads, D width of a head; N runs of L
tokens (Lq queries, Lk keys) in one call, T = N L.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge_parallel._shared.problems import invalid
from forge_parallel._torch_compat import function_output
from forge_parallel.axes.attention_kernels import kernel_for
from forge_parallel.axes.tiles import Runs, Tiling


class KeyExchange(Protocol):
    """Provides the keys of each part, if not all are on this rank; see axes/key_exchange.py."""

    saves_gathered: bool

    def keys(self, kv: Tensor) -> Iterator[Tensor]:
        """Keys and values (2, B, S', K, D) of each part, from this rank's own (2, B, S, K, D)."""

    def gradients(self, saved: Tensor, gradient: Callable[[int, Tensor], Tensor]) -> Tensor:
        """Gradient of this rank's own keys and values, summed from `gradient(part, keys)` of each part.

        saved: the last output of `keys` if `saves_gathered`, else its input.
        """


def blockwise_attention(
    q: Tensor, k: Tensor, v: Tensor, tiling: Tiling, exchange: KeyExchange | None = None
) -> Tensor:
    """Attention of q (B, S, H, D) to k, v (B, S, K, D) in the tiles of `tiling` -> like q.

        blockwise_attention(q, k, v, Plan([[Piece(None, 0, S, 0, S, True)]]))     # causal rows

    Scores are scaled by D ** -0.5. Tiles run in flash kernels on CPU and, in 16 bits with D a multiple of 8 up to
    256, on CUDA (there one varlen call for all tiles of a kind); fp64, and fp32 on CUDA, run as plain products that
    hold the scores of a call. The CUDA path was not run by us; there the order of sums over packed rows varies,
    except under torch.use_deterministic_algorithms. Merging and sums of gradients are in fp32. Saved for backward:
    q, keys and values (own ones, or all of them if `exchange` gathers them), the output, 4 bytes per query and
    head. Raises ValueError if v does not have the shape of k, or H is no multiple of K.
    """
    if k.shape != v.shape or q.size(2) % k.size(2) or q.size(3) != k.size(3):
        rule = f"must have the shape of v {tuple(v.shape)}, the head width of q {tuple(q.shape)} and heads that divide its own"
        raise invalid("k", "shape", tuple(k.shape), rule, "pad v, or repeat heads")
    out: Tensor = _Blockwise.apply(q, k, v, tiling, exchange)
    return out


class _Blockwise(torch.autograd.Function):
    """One function for all tiles. Autograd over the single kernels would save the output of each of them; with the
    merged output and log-sum-exp the backward computes the gradients of every tile anew from its keys."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, tiling: Tiling, exchange: KeyExchange | None
    ) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        merged = torch.zeros(q.shape, dtype=wide, device=q.device)  # (B, S, H, D)
        lse = torch.full(q.shape[:3], -torch.inf, dtype=wide, device=q.device)  # (B, S, H)
        kernel = kernel_for(q)
        own = kv = torch.stack((k, v))  # (2, B, S, K, D)
        for part, kv in enumerate((own,) if exchange is None else exchange.keys(own)):
            for group in tiling.groups(part, kernel.ragged):
                keys = (group.keys.take(t) for t in kv)
                out, new = kernel.forward(group.queries.take(q), *keys, group)
                _merge(merged, lse, group.queries, out, new)
        out = function_output(merged.to(q.dtype))
        ctx.tiling, ctx.exchange = tiling, exchange
        last = exchange is not None and exchange.saves_gathered
        ctx.save_for_backward(q, kv if last else own, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, saved, out, lse = ctx.saved_tensors
        grad = grad.contiguous()  # kernels do not accept an expanded gradient, as of a sum
        kernel, grad_q = kernel_for(q), torch.zeros(q.shape, dtype=lse.dtype, device=q.device)

        def gradient(part: int, kv: Tensor) -> Tensor:
            found = torch.zeros(kv.shape, dtype=lse.dtype, device=kv.device)
            for group in ctx.tiling.groups(part, kernel.ragged):
                queries = [group.queries.take(t) for t in (grad, q, out, lse)]
                keys = (group.keys.take(t) for t in kv)
                dq, *dkv = kernel.backward(*queries, *keys, group)
                group.queries.add(grad_q, dq)
                for total, more in zip(found, dkv):
                    group.keys.add(total, more)
            return found

        alone = ctx.exchange is None
        total = gradient(0, saved) if alone else ctx.exchange.gradients(saved, gradient)
        grad_k, grad_v = total.to(q.dtype)
        return grad_q.to(q.dtype), grad_k, grad_v, None, None


def _merge(merged: Tensor, lse: Tensor, runs: Runs, out: Tensor, new: Tensor) -> None:
    """Merge the output (N, L, H, D) and log-sum-exp (N, L, H) of further keys, in place."""
    before = runs.take(lse)
    after = torch.logaddexp(before, new)
    old, more = ((part - after).exp().unsqueeze(-1) for part in (before, new))
    runs.put(merged, old * runs.take(merged) + more * out)
    runs.put(lse, after)
