"""Exact attention from rectangular tiles of the (query, key) square.

Each tile gives an output and the log-sum-exp of its scores. With both, tiles merge exactly; and with the merged
ones the backward of each tile gives its exact part of the gradients, on whatever rank the keys of other tiles are
(ring attention, Liu et al. 2023).

Shapes: B rows, S tokens of a row, H query heads, K key/value heads, D width of a head; N runs of L
tokens (Lq queries, Lk keys) in one call, T = N L.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge_parallel._torch_compat import Borders, function_output
from forge_parallel.axes.attention_kernels import kernel_for


class Tile(NamedTuple):
    """Queries [query, query + queries) of a row see its keys [key, key + keys), all or causally.

    row None: so in every row. A causal piece has as many keys as queries.
    """

    row: int | None
    query: int
    queries: int
    key: int
    keys: int
    causal: bool


class Runs:
    """Runs (row, start, length) of tokens that are read from and written to tensors (B, S, ...).

    Read, they are (N, L, ...) if all have one length, else concatenated, (1, T, ...). A single run of row None is a
    slice of all rows, without a copy.
    """

    def __init__(self, runs: Sequence[tuple[int | None, int, int]]) -> None:
        self.runs = tuple(runs)
        self.lengths = [length for _, _, length in runs]
        self.everywhere = runs[0][0] is None
        self._indices: dict[Any, Tensor] = {}

    def _index(self, x: Tensor) -> Tensor:
        """Positions (T,) in the flattened rows of x; one copy to its device."""
        key = (x.device, x.size(1))
        if key not in self._indices:
            starts = ((row or 0) * x.size(1) + start for row, start, _ in self.runs)
            spans = [torch.arange(s, s + n) for s, n in zip(starts, self.lengths)]
            self._indices[key] = torch.cat(spans).to(x.device, non_blocking=True)
        return self._indices[key]

    def take(self, x: Tensor) -> Tensor:
        """x (B, S, ...) -> (N, L, ...)."""
        if self.everywhere:
            _, start, length = self.runs[0]
            return x.narrow(1, start, length)
        flat = x.flatten(0, 1).index_select(0, self._index(x))
        same = len(set(self.lengths)) == 1
        return flat.unflatten(0, (len(self.runs), -1) if same else (1, -1))

    def put(self, x: Tensor, values: Tensor) -> None:
        """Write values (N, L, ...) to their positions in x; positions must be distinct."""
        if self.everywhere:
            self.take(x).copy_(values)
        else:
            x.view(-1, *x.shape[2:]).index_copy_(0, self._index(x), values.flatten(0, 1))

    def add(self, x: Tensor, values: Tensor) -> None:
        """Add values (N, L, ...) at their positions in x."""
        if self.everywhere:
            self.take(x).add_(values)
        else:
            x.view(-1, *x.shape[2:]).index_add_(0, self._index(x), values.flatten(0, 1).to(x.dtype))

    def borders(self, rows: int, device: torch.device) -> tuple[Tensor, int]:
        """Cumulative lengths (N + 1,) int32, and the longest; `rows` is the B of slices."""
        lengths = self.lengths * rows if self.everywhere else self.lengths
        key = ("borders", device, len(lengths))
        if key not in self._indices:
            ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
            self._indices[key] = ends.to(device, non_blocking=True)
        return self._indices[key], max(lengths)


class TileBatch:
    """Tiles that run in one kernel call."""

    def __init__(self, tiles: Sequence[Tile]) -> None:
        self.causal = tiles[0].causal
        self.queries = Runs([(p.row, p.query, p.queries) for p in tiles])
        self.keys = Runs([(p.row, p.key, p.keys) for p in tiles])

    def borders(self, rows: int, device: torch.device) -> Borders:
        (queries, longest), (keys, most) = (
            runs.borders(rows, device) for runs in (self.queries, self.keys)
        )
        return queries, keys, longest, most


class Tiling:
    """The tiles of each part; a part has keys of its own. Host integers, made once per forward.

    In one part a query may be in one full and in one causal tile.
    """

    def __init__(self, parts: Sequence[Sequence[Tile]]) -> None:
        self.parts = tuple(tuple(part) for part in parts)
        self._groups: dict[tuple[int, bool], list[TileBatch]] = {}

    def groups(self, part: int, ragged: bool) -> list[TileBatch]:
        """Kernel calls of a part: one per shape, or with `ragged` one for full and one for causal tiles."""
        key = (part, ragged)
        if key not in self._groups:
            alike: dict[Any, list[Tile]] = {}
            for tile in self.parts[part]:
                shape = () if ragged else (tile.queries, tile.keys)
                kind = tile if tile.row is None else (tile.causal, *shape)
                alike.setdefault(kind, []).append(tile)
            self._groups[key] = [TileBatch(tiles) for tiles in alike.values()]
        return self._groups[key]


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
        raise ValueError(
            f"k {tuple(k.shape)} and v {tuple(v.shape)} must have one shape, with the head width of q "
            f"{tuple(q.shape)} and heads that divide its own; pad v, or repeat heads"
        )
    out: Tensor = _Blockwise.apply(q, k, v, tiling, exchange)
    return out


class _Blockwise(torch.autograd.Function):
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
