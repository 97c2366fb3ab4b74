"""Keys and values of past tokens, and which of them a new token may see.

Shapes: B rows, S new tokens, T cached and new tokens, K key/value heads, H query heads,
D width of a head.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forge_core._shared.problems import invalid
from forge_core.model.context import TokenContext
from forge_core.model.documents import SegmentPlan, cut, within_segments
from forge_core.model.rows import PLAIN, attend_masked, visible
from forge_core.model.spec import AttentionSpec


@dataclass(frozen=True)
class Span:
    """New tokens [start, stop) of some rows that see the tokens from `first` on, causally."""

    rows: tuple[int, ...]
    start: int
    stop: int
    first: int


class History:
    """Per row: where its newest document began, and that document's id. Host integers only."""

    def __init__(self) -> None:
        self.length = 0
        self.first: list[int] = []
        self.last_id: list[int] = []

    def peek(self, document_ids: Tensor | None, batch: int, size: int) -> list[list[int]]:
        """For each row the first visible index of each segment among the new tokens, in order.

        The first entry is below `length` where the row's newest document continues.
        """
        return [starts for starts, _ in self._extend(document_ids, batch, size)]

    def _extend(
        self, document_ids: Tensor | None, batch: int, size: int
    ) -> list[tuple[list[int], int]]:
        if document_ids is None:  # each row continues its newest document
            last = self.last_id or [0] * batch
            ids, lengths = [[i, i] for i in last], [[size]] * batch
        else:
            host = document_ids.cpu()
            ids, lengths = host[:, [0, -1]].tolist(), cut(host)
        rows = []
        for row in range(batch):
            starts = [self.length]
            for length in lengths[row][:-1]:
                starts.append(starts[-1] + length)
            if self.length and ids[row][0] == self.last_id[row]:
                starts[0] = self.first[row]
            rows.append((starts, ids[row][1]))
        return rows

    def advance(self, document_ids: Tensor | None, batch: int, size: int) -> None:
        """Take note of `size` new tokens in each of `batch` rows."""
        rows = self._extend(document_ids, batch, size)
        self.first = [starts[-1] for starts, _ in rows]
        self.last_id = [last for _, last in rows]
        self.length += size


def _spans(starts: Sequence[Sequence[int]], past: int, size: int) -> list[Span]:
    """Spans of the new tokens, grouped by rows with the same cuts."""
    rows: dict[tuple[int, int, int], list[int]] = {}
    for row, firsts in enumerate(starts):
        begins = [0, *(first - past for first in firsts[1:])]
        for first, start, stop in zip(firsts, begins, [*begins[1:], size]):
            rows.setdefault((start, stop, first), []).append(row)
    return [Span(tuple(members), *key) for key, members in rows.items()]


class LayerCache:
    """One layer's keys and values: one allocation at the first write, sized for `max_length` tokens.

    Dtype, device, rows and heads are those of the first write, so the cache fits autocast, sharded
    heads and any mixer whose state is two tensors (B, heads, S, width).
    """

    def __init__(self, max_length: int, history: History | None = None) -> None:
        self.max_length = max_length
        self.length = 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.history = History() if history is None else history
        self._owns_history = history is None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v (B, S, K, D); returns views of all so far, (B, K, T, D). Where v is k, one is stored.

        Raises ValueError when the cache is full or the rows are not those of the first write.
        """
        size, total = k.size(1), self.length + k.size(1)
        if total > self.max_length:
            rule = f"of the KV cache must be at least {total}, the tokens to store"
            raise invalid("max_length", "full", self.max_length, rule, "make it longer")
        if self.keys is None or self.values is None:
            self.keys = self._empty(k)
            self.values = self.keys if v is k else self._empty(v)
        if k.size(0) != self.keys.size(0):
            rule = f"must have the {self.keys.size(0)} rows of the KV cache"
            raise invalid("k", "batch", tuple(k.shape), rule, "use a new cache for another batch")
        self.keys[:, :, self.length : total] = k.detach().transpose(1, 2)
        if v is not k:
            self.values[:, :, self.length : total] = v.detach().transpose(1, 2)
        self.length += size
        return self.keys[:, :, :total], self.values[:, :, :total]

    def _empty(self, t: Tensor) -> Tensor:
        return t.new_empty(t.size(0), t.size(2), self.max_length, t.size(3))

    def first(self, ctx: TokenContext, batch: int, size: int) -> tuple[int, list[int]]:
        """Tokens stored so far, and where each row's first new token's document began."""
        return self.length, [starts[0] for starts in self._starts(ctx, batch, size)]

    def _starts(self, ctx: TokenContext, batch: int, size: int) -> list[list[int]]:
        key = ("starts", id(self.history))
        return ctx.once(key, lambda: self.history.peek(ctx.document_ids, batch, size))

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        ctx: TokenContext,
        spec: AttentionSpec = PLAIN,
        sinks: Tensor | None = None,
        *,
        stored: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Store k, v (B, S, K, D) and attend q (B, S, H, D) to the tokens that each may see -> like q.

        `stored`, of an empty cache, is kept in place of k and v, which only these tokens see: later calls give
        theirs in its form. Keys outside of a window stay stored. A `ctx.mask` is that of the first tokens. ValueError for a mask of its own: a token cannot see later ones.
        """
        refuse_mask(spec)
        batch, size = q.shape[:2]
        past = self.length
        keys, values = self.append(*(stored or (k, v)))
        if past == 0 and ctx.mask is not None:
            out = ctx.mask.attend(q, k, v, spec, sinks)
        elif past == 0:
            plan = ctx.segments() or SegmentPlan.of_lengths([[size]] * batch)
            out = within_segments(q, k, v, plan, spec, sinks)
        else:
            starts = self._starts(ctx, batch, size)
            query = q.transpose(1, 2)  # (B, H, S, D)
            attend = _one_token if size == 1 else _many_tokens
            seen = attend(query, keys, values, starts, past, ctx, spec, sinks)
            out = seen.transpose(1, 2)
        if self._owns_history:
            self.history.advance(ctx.document_ids, batch, size)
        return out


def refuse_mask(spec: AttentionSpec) -> None:
    """ValueError for an attention that a cache cannot compute."""
    if spec.mask != "causal":
        rule = "is not computed with a KV cache, where a token sees only earlier ones"
        fix = "score whole rows without a cache, or use 'causal'"
        raise invalid("attention.mask", "unsupported", spec.mask, rule, fix)


def _one_token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: list[list[int]],
    past: int,
    ctx: TokenContext,
    spec: AttentionSpec,
    sinks: Tensor | None,
) -> Tensor:
    """One new token per row: q (B, H, 1, D), k and v (B, K, T, D) -> (B, H, 1, D)."""
    oldest = 0 if spec.window is None else past + 1 - spec.window
    first = [max(row[0], oldest) for row in starts]
    low = min(first)
    mask = None
    if max(first) != low:  # (B, 1, 1, T): one row of keys for one query, nothing quadratic

        def reached() -> Tensor:
            begin = torch.tensor(first).to(q.device, non_blocking=True)
            return torch.arange(low, past + 1, device=q.device) >= begin[:, None, None, None]

        mask = ctx.once(("one token", q.device, spec.window), reached)
    return attend_masked(q, k[:, :, low:], v[:, :, low:], mask, spec, sinks)


def _many_tokens(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: list[list[int]],
    past: int,
    ctx: TokenContext,
    spec: AttentionSpec,
    sinks: Tensor | None,
) -> Tensor:
    """Several new tokens after cached ones, a call per distinct span: shapes as `_one_token`."""
    out = torch.empty_like(q)
    for span in _spans(starts, past, q.size(2)):
        if len(span.rows) == q.size(0):
            rows: slice | Tensor = slice(None)
        else:  # as an index a list is copied with a wait
            rows = torch.tensor(span.rows).to(q.device, non_blocking=True)
        start, stop = past + span.start, past + span.stop
        first = span.first if spec.window is None else max(span.first, start + 1 - spec.window)
        q_index = torch.arange(start, stop, device=q.device)
        k_index = torch.arange(first, stop, device=q.device)
        out[rows, :, span.start : span.stop] = attend_masked(
            q[rows][:, :, span.start : span.stop],
            k[rows][:, :, first:stop],
            v[rows][:, :, first:stop],
            visible(q_index, k_index, spec.window),  # (new, visible)
            spec,
            sinks,
        )
    return out


class KVCache:
    """Past keys and values of a model, for rows that grow by the same number of tokens per call.

        cache = KVCache(max_length=1024); logits = model(prompt, cache=cache)

    Memory: 2 * layers * B * max_length * K * D elements (of latent attention, layers * B * max_length times the
    width of a latent and the turned dims), allocated layer by layer at the first call in the dtype and on the
    device of the keys.
    """

    def __init__(self, max_length: int) -> None:
        if max_length < 1:
            fix = "give the longest row"
            raise invalid("max_length", "range", max_length, "must be at least 1", fix)
        self.max_length = max_length
        self.history = History()
        self.layers: dict[str, LayerCache] = {}

    @property
    def length(self) -> int:
        """Tokens stored so far, per row."""
        return self.history.length

    def layer(self, key: str) -> LayerCache:
        """The part of one layer, made at the first request."""
        if key not in self.layers:
            self.layers[key] = LayerCache(self.max_length, self.history)
        return self.layers[key]
