"""Exact attention from rectangular tiles of the (query, key) square, whose keys may be on other ranks.

Each tile gives an output and the log-sum-exp of its scores. With both, tiles merge exactly; and with the merged
ones the backward of each tile gives its exact part of the gradients, on whatever rank the keys of other tiles are
(ring attention, Liu et al. 2023).

Shapes: B sequences, S tokens of a sequence on this rank, W ranks, H query heads, K key/value heads, D width of a head;
N runs of L tokens (Lq queries, Lk keys) in one kernel call, T = N L.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge_parallel._shared.flash import (
    Boundaries,
    flash_cpu,
    flash_cpu_backward,
    flash_varlen,
    flash_varlen_backward,
)
from forge_parallel._shared.problems import invalid
from forge_parallel._torch_compat import function_output, start_all_gather, start_reduce_scatter


class Tile(NamedTuple):
    """Queries [query, query + queries) of a sequence see its keys [key, key + keys), all or causally.

    sequence None: in every sequence. A causal tile has as many keys as queries; `backwards` it is causal from the last
    query and key to the first: each query sees the key of its own number and the later ones.
    """

    sequence: int | None
    query: int
    queries: int
    key: int
    keys: int
    causal: bool
    backwards: bool = False
    turn: int = 0  # tiles of different turns never run in one call


class Runs:
    """Runs (sequence, start, length) of tokens that are read from and written to tensors (B, S, ...), or `backwards`.

    Read, they are (N, L, ...) if all have one length, else concatenated, (1, T, ...). A single run of sequence None is a
    slice of all sequences, and without a copy if it is not read backwards.
    """

    def __init__(
        self, runs: Sequence[tuple[int | None, int, int]], backwards: bool = False
    ) -> None:
        self.runs = tuple(runs)
        self.backwards = backwards
        self.lengths = [length for _, _, length in runs]
        self.everywhere = runs[0][0] is None
        self._indices: dict[Any, Tensor] = {}

    def _index(self, x: Tensor) -> Tensor:
        """Positions (T,) in the flattened sequences of x; one copy to its device."""
        key = (x.device, x.size(1))
        if key not in self._indices:
            starts = ((row or 0) * x.size(1) + start for row, start, _ in self.runs)
            runs = [self._flipped(torch.arange(s, s + n), 0) for s, n in zip(starts, self.lengths)]
            self._indices[key] = torch.cat(runs).to(x.device, non_blocking=True)
        return self._indices[key]

    def _flipped(self, x: Tensor, dim: int) -> Tensor:
        """x in reading order: reversed along dim, if `backwards`."""
        return x.flip(dim) if self.backwards else x

    def _slice(self, x: Tensor) -> Tensor:
        """The single run of every sequence, as a view."""
        _, start, length = self.runs[0]
        return x.narrow(1, start, length)

    def take(self, x: Tensor) -> Tensor:
        """x (B, S, ...) -> (N, L, ...)."""
        if self.everywhere:
            return self._flipped(self._slice(x), 1)
        flat = x.flatten(0, 1).index_select(0, self._index(x))  # (T, ...)
        same = len(set(self.lengths)) == 1
        return flat.unflatten(0, (len(self.runs), -1) if same else (1, -1))

    def put(self, x: Tensor, values: Tensor) -> None:
        """Write values (N, L, ...) to their positions in x; positions must be distinct."""
        if self.everywhere:
            self._slice(x).copy_(self._flipped(values, 1))
        else:
            x.view(-1, *x.shape[2:]).index_copy_(0, self._index(x), values.flatten(0, 1))

    def add(self, x: Tensor, values: Tensor) -> None:
        """Add values (N, L, ...) at their positions in x."""
        if self.everywhere:
            self._slice(x).add_(self._flipped(values, 1))
        else:
            x.view(-1, *x.shape[2:]).index_add_(0, self._index(x), values.flatten(0, 1).to(x.dtype))

    def boundaries(self, batch: int, device: torch.device) -> tuple[Tensor, int]:
        """Cumulative lengths (N + 1,) int32, and the longest; `batch` is the B of slices."""
        lengths = self.lengths * batch if self.everywhere else self.lengths
        key = ("boundaries", device, len(lengths))
        if key not in self._indices:
            ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
            self._indices[key] = ends.to(device, non_blocking=True)
        return self._indices[key], max(lengths)


class TileBatch:
    """Tiles that run in one kernel call."""

    def __init__(self, tiles: Sequence[Tile]) -> None:
        self.causal = tiles[0].causal
        backwards = tiles[0].backwards
        self.queries = Runs([(t.sequence, t.query, t.queries) for t in tiles], backwards)
        self.keys = Runs([(t.sequence, t.key, t.keys) for t in tiles], backwards)

    def boundaries(self, batch: int, device: torch.device) -> Boundaries:
        """`cu_seqlens` of queries and of keys, and the longest run of each."""
        queries, longest = self.queries.boundaries(batch, device)
        keys, most = self.keys.boundaries(batch, device)
        return Boundaries(queries, keys, longest, most)


class Tiling:
    """The tiles of each part; a part has keys of its own. Host integers, made once per forward.

    In one turn of a part a query may be in one full tile, one causal one, and one that is causal backwards.
    """

    def __init__(self, parts: Sequence[Sequence[Tile]]) -> None:
        self.parts = tuple(tuple(part) for part in parts)
        self._batches: dict[tuple[int, bool], list[TileBatch]] = {}

    def batches(self, part: int, ragged: bool) -> list[TileBatch]:
        """Kernel calls of a part: one per kind and shape, or with `ragged` one per kind."""
        key = (part, ragged)
        if key not in self._batches:
            alike: dict[Any, list[Tile]] = {}
            for tile in self.parts[part]:
                shape = () if ragged else (tile.queries, tile.keys)
                kind: Any = tile
                if tile.sequence is not None:
                    kind = (tile.causal, tile.backwards, tile.turn, *shape)
                alike.setdefault(kind, []).append(tile)
            self._batches[key] = [TileBatch(tiles) for tiles in alike.values()]
        return self._batches[key]


def chunks_of(rank: int, size: int) -> tuple[int, int]:
    """The chunks of a sequence that a rank holds, of 2 * size, in this order.

    An early and a late one, so that under a causal mask all ranks have the same work.
    """
    return rank, 2 * size - 1 - rank


def local_chunks(x: Tensor, rank: int, size: int, dim: int) -> Tensor:
    """The tokens (..., S, ...) of a rank in full sequences (..., S W, ...) along dim."""
    chunks = x.chunk(2 * size, dim)
    return torch.cat([chunks[n] for n in chunks_of(rank, size)], dim)


def gather_chunks(shards: Tensor, dim: int) -> Tensor:
    """Shards of all ranks (W, ..., S, ...) -> full sequences (..., S W, ...); dim is that of S in a shard."""
    first, second = (half.unbind(0) for half in shards.chunk(2, dim + 1))
    return torch.cat((*first, *reversed(second)), dim)


class AllGather:
    """Parts: this rank's own keys, then those of full sequences in order (2, B, S W, K, D).

    Forward: one all-gather of 2 B S K D elements a rank, under which the first part is computed.
    Backward: one reduce-scatter of as many, in fp32, under which the first part is computed. Memory: all
    keys and values stay until backward. Works on every backend.
    """

    saves_gathered = True

    def __init__(self, axis: Any) -> None:
        self.axis = axis

    def keys(self, kv: Tensor) -> Iterator[Tensor]:
        """Keys and values of each part, from this rank's own (2, B, S, K, D)."""
        size = self.axis.size
        pending = start_all_gather(kv, size, self.axis.group.group_name)
        yield kv
        yield gather_chunks(pending().unflatten(0, (size, -1)), 2)

    def gradients(self, saved: Tensor, gradient: Callable[[int, Tensor], Tensor]) -> Tensor:
        """Gradient of this rank's own keys and values, summed from `gradient(part, keys)` of each part; `saved` is the
        last output of `keys`."""
        rank, size = self.axis.rank, self.axis.size
        total = gradient(1, saved)
        shards = torch.stack([local_chunks(total, r, size, 2) for r in range(size)])
        pending = start_reduce_scatter(shards.flatten(0, 1), size, self.axis.group.group_name)
        return gradient(0, local_chunks(saved, rank, size, 2)).add_(pending())


class Ring:
    """Parts: the keys of rank r, r - 1, ... (2, B, S, K, D), each sent on to rank r + 1 meanwhile.

    Forward: W - 1 exchanges of 2 B S K D elements. Backward: as many again, and W of as many in fp32 for
    the gradients, which follow the keys around the ring and reach their own rank last. Memory: two ranks' keys and values at
    a time, own ones until backward. Needs point-to-point communication between all neighbors.
    """

    saves_gathered = False

    def __init__(self, axis: Any) -> None:
        self.axis = axis

    def keys(self, kv: Tensor) -> Iterator[Tensor]:
        """As of `AllGather`."""
        # the last keys need not be sent on
        for step in range(self.axis.size):
            pending = self._send_on(kv, tag=0) if step + 1 < self.axis.size else None
            yield kv
            if pending is not None:
                kv = pending()

    def gradients(self, saved: Tensor, gradient: Callable[[int, Tensor], Tensor]) -> Tensor:
        """As of `AllGather`, with `saved` the input of `keys`."""
        incoming: Callable[[], Tensor] | None = None
        for part, kv in enumerate(self.keys(saved)):
            local_grad = gradient(part, kv)
            if incoming is not None:
                local_grad += incoming()
            # own tag: these travel at the same time as the keys of the next part
            incoming = self._send_on(local_grad, tag=1)
        assert incoming is not None
        return incoming()

    def _send_on(self, tensor: Tensor, tag: int) -> Callable[[], Tensor]:
        """Start to send to the next rank; the returned function waits for the tensor of the rank before."""
        rank, size, group = self.axis.rank, self.axis.size, self.axis.group
        ranks, pending = dist.get_process_group_ranks(group), torch.empty_like(tensor)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor, ranks[(rank + 1) % size], group, tag),
                dist.P2POp(dist.irecv, pending, ranks[(rank - 1) % size], group, tag),
            ]
        )

        def wait() -> Tensor:
            for work in works:
                work.wait()
            return pending

        return wait


def blockwise_attention(
    q: Tensor, k: Tensor, v: Tensor, tiling: Tiling, exchange: AllGather | Ring | None = None
) -> Tensor:
    """Attention of q (B, S, H, D) to k, v (B, S, K, D) in the tiles of `tiling` -> like q.

        blockwise_attention(q, k, v, Tiling([[Tile(None, 0, S, 0, S, True)]]))     # causal sequences

    `exchange` provides the keys of each part, if not all are on this rank. Scores are scaled by D ** -0.5. Tiles run in
    flash kernels on CPU and, in 16 bits with D a multiple of 8 up to
    256, on CUDA (there one varlen call for all tiles of a kind); fp64, and fp32 on CUDA, run as plain matmuls that
    hold the scores of a call. The CUDA path has never run (`_shared.flash.flash_varlen`); there the order of sums over
    packed sequences varies, except under torch.use_deterministic_algorithms. Merging and sums of gradients are in fp32.
    Saved for backward: q, keys and values (own ones, or all of them if `exchange` gathers them), the output, 4 bytes
    per query and head. Raises ValueError if v does not have the shape of k, or H is no multiple of K.
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
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tiling: Tiling,
        exchange: AllGather | Ring | None,
    ) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        merged = torch.zeros(q.shape, dtype=wide, device=q.device)  # (B, S, H, D)
        lse = torch.full(
            q.shape[:3], -torch.inf, dtype=wide, device=q.device
        )  # (B, S, H): no key seen yet

        kernel = _kernel_for(q)
        own = kv = torch.stack((k, v))  # (2, B, S, K, D)
        for part, kv in enumerate((own,) if exchange is None else exchange.keys(own)):
            for batch in tiling.batches(part, kernel.ragged):
                keys = (batch.keys.take(t) for t in kv)
                out, new = kernel.forward(batch.queries.take(q), *keys, batch)
                _merge(merged, lse, batch.queries, out, new)

        out = function_output(merged.to(q.dtype))
        ctx.tiling, ctx.exchange = tiling, exchange
        # gathered keys are kept, a ring sends them again
        last = exchange is not None and exchange.saves_gathered
        ctx.save_for_backward(q, kv if last else own, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, saved, out, lse = ctx.saved_tensors
        grad = grad.contiguous()  # kernels do not accept an expanded gradient, as of a sum
        kernel, grad_q = _kernel_for(q), torch.zeros(q.shape, dtype=lse.dtype, device=q.device)

        def gradient(part: int, kv: Tensor) -> Tensor:
            # the probabilities of a tile are exp(score - lse) with the lse of all keys, so tiles add up
            found = torch.zeros(kv.shape, dtype=lse.dtype, device=kv.device)
            for batch in ctx.tiling.batches(part, kernel.ragged):
                queries = [batch.queries.take(t) for t in (grad, q, out, lse)]
                keys = (batch.keys.take(t) for t in kv)
                dq, *dkv = kernel.backward(*queries, *keys, batch)
                batch.queries.add(grad_q, dq)
                for total, more in zip(found, dkv):
                    batch.keys.add(total, more)
            return found

        on_rank = ctx.exchange is None
        total = gradient(0, saved) if on_rank else ctx.exchange.gradients(saved, gradient)
        grad_k, grad_v = total.to(q.dtype)
        return grad_q.to(q.dtype), grad_k, grad_v, None, None


def _merge(merged: Tensor, lse: Tensor, runs: Runs, out: Tensor, new: Tensor) -> None:
    """Merge the output (N, L, H, D) and log-sum-exp (N, L, H) of further keys, in place."""
    before = runs.take(lse)
    after = torch.logaddexp(before, new)
    old, more = ((part - after).exp().unsqueeze(-1) for part in (before, new))
    runs.put(merged, old * runs.take(merged) + more * out)
    runs.put(lse, after)


class _Kernel(NamedTuple):
    """forward(q, k, v, batch) -> out, lse; backward(grad, q, out, lse, k, v, batch) -> dq, dk, dv.

    A ragged kernel takes tiles of any lengths, concatenated with N = 1, and their boundaries from the batch.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    ragged: bool


def _kernel_for(q: Tensor) -> _Kernel:
    """Flash where there is a kernel for the device, dtype and width of q (B, S, H, D)."""
    if q.dtype != torch.float64 and q.device.type == "cpu":
        return _FLASH_CPU
    short = q.dtype in (torch.float16, torch.bfloat16)
    flash = short and q.is_cuda and q.size(3) % 8 == 0 and q.size(3) <= 256
    return _FLASH_VARLEN if flash else _PLAIN


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """(N, L, K, D) -> (N, H, L, D)."""
    x = x if x.size(2) == heads else x.repeat_interleave(heads // x.size(2), dim=2)
    return x.transpose(1, 2)


def _sum_repeated_heads(grad: Tensor, kv_heads: int) -> Tensor:
    """(N, H, L, D) -> (N, L, K, D): the backward of `repeat_heads`, in fp32."""
    grad = grad.transpose(1, 2)
    if grad.size(2) == kv_heads:
        return grad
    wide = torch.promote_types(grad.dtype, torch.float32)
    return grad.unflatten(2, (kv_heads, -1)).sum(3, dtype=wide)


def _by_heads(forward: Callable[..., Any], backward: Callable[..., Any]) -> _Kernel:
    """The kernel of functions on (N, H, L, D) whose keys and values have as many heads as queries."""

    def run(q: Tensor, k: Tensor, v: Tensor, batch: TileBatch) -> tuple[Tensor, Tensor]:
        keys, values = (repeat_heads(t, q.size(2)) for t in (k, v))
        out, lse = forward(q.transpose(1, 2), keys, values, batch.causal)
        return out.transpose(1, 2), lse.transpose(1, 2)

    def run_back(
        grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, batch: TileBatch
    ) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = (repeat_heads(t, q.size(2)) for t in (k, v))
        grad, q, out, lse = (t.transpose(1, 2) for t in (grad, q, out, lse))
        dq, dk, dv = backward(grad, q, keys, values, out, lse, batch.causal)
        dk, dv = (_sum_repeated_heads(d, k.size(2)) for d in (dk, dv))
        return dq.transpose(1, 2), dk, dv

    return _Kernel(run, run_back, ragged=False)


def scaled_scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Scores of attention (N, H, Lq, Lk), at least in fp32, of q and k (N, H, L, D)."""
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.to(wide) @ k.to(wide).mT * scale


def _causal_scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """Scores with -inf for later keys, if `causal`."""
    scores = scaled_scores(q, k, q.size(-1) ** -0.5)
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp by matmuls, of (N, H, L, D)."""
    scores = _causal_scores(q, k, causal)
    return scores.softmax(-1) @ v.to(scores.dtype), scores.logsumexp(-1)


def _plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v by matmuls, for any out and lse that hold these keys."""
    weights = (_causal_scores(q, k, causal) - lse.unsqueeze(-1)).exp()
    grad, q, k, v, out = (t.to(weights.dtype) for t in (grad, q, k, v, out))
    # d softmax: P (dP - sum_j P_j dP_j), where the sum over all tiles is grad . out
    grad_scores = grad @ v.mT - (grad * out).sum(-1, keepdim=True)
    grad_scores = weights * grad_scores * q.size(-1) ** -0.5
    return grad_scores @ k, grad_scores.mT @ q, weights.mT @ grad


def _varlen_forward(q: Tensor, k: Tensor, v: Tensor, batch: TileBatch) -> tuple[Tensor, Tensor]:
    """`flash_varlen` on the runs of a batch."""
    boundaries = batch.boundaries(q.size(0), q.device)
    flat_q, flat_k, flat_v = (t.flatten(0, 1) for t in (q, k, v))  # (T, H or K, D)
    out, lse = flash_varlen(flat_q, flat_k, flat_v, boundaries, batch.causal)
    return out.view(q.shape), lse.t().unflatten(0, q.shape[:2])


def _varlen_backward(
    grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, batch: TileBatch
) -> tuple[Tensor, Tensor, Tensor]:
    """`flash_varlen_backward` on the runs of a batch."""
    boundaries = batch.boundaries(q.size(0), q.device)
    lse = lse.flatten(0, 1).t().contiguous()  # (H, T)
    flat_grad, flat_q, flat_k, flat_v, flat_out = (t.flatten(0, 1) for t in (grad, q, k, v, out))
    dq, dk, dv = flash_varlen_backward(
        flat_grad, flat_q, flat_k, flat_v, flat_out, lse, boundaries, batch.causal
    )
    return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)


_FLASH_CPU = _by_heads(flash_cpu, flash_cpu_backward)
_FLASH_VARLEN = _Kernel(_varlen_forward, _varlen_backward, ragged=True)
_PLAIN = _by_heads(_plain_forward, _plain_backward)
