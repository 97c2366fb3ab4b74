"""KV cache for incremental decoding: keys and values of past tokens, and who of the new tokens may see them.

Shapes: B sequences, S new tokens, T cached and new tokens, K key/value heads, H query heads, D width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forge_core._shared.problems import invalid
from forge_core.model.attention_ops import (
    PLAIN,
    AttentionSpec,
    SegmentPlan,
    attend_documents,
    attend_masked,
    document_lengths,
    visible,
)
from forge_core.model.context import TokenContext


class History:
    """Per sequence: where its newest document began, and that document's id. Host integers only."""

    def __init__(self) -> None:
        self.length = 0
        self.first: list[int] = []
        self.last_id: list[int] = []

    def peek(self, document_ids: Tensor | None, batch: int, size: int) -> list[list[int]]:
        """For each sequence the first visible index of each segment among the new tokens, in order.

        The first entry is below `length` if the sequence's newest document continues.
        """
        return [starts for starts, _ in self._extend(document_ids, batch, size)]

    def _extend(
        self, document_ids: Tensor | None, batch: int, size: int
    ) -> list[tuple[list[int], int]]:
        """For each sequence: `peek`'s list, and the id of the last new token."""
        if document_ids is None:  # each sequence continues its newest document
            last = self.last_id or [0] * batch
            ids, lengths = [[i, i] for i in last], [[size]] * batch
        else:
            host = document_ids.cpu()
            ids, lengths = host[:, [0, -1]].tolist(), document_lengths(host)

        found = []
        for sequence in range(batch):
            starts = [self.length]
            for length in lengths[sequence][:-1]:
                starts.append(starts[-1] + length)
            if self.length and ids[sequence][0] == self.last_id[sequence]:
                starts[0] = self.first[sequence]
            found.append((starts, ids[sequence][1]))
        return found

    def advance(self, document_ids: Tensor | None, batch: int, size: int) -> None:
        """Record `size` new tokens in each of `batch` sequences."""
        found = self._extend(document_ids, batch, size)
        self.first = [starts[-1] for starts, _ in found]
        self.last_id = [last for _, last in found]
        self.length += size


class LayerCache:
    """Keys and values of one layer: one allocation at the first write, sized for `max_length` tokens.

    Dtype, device, batch and heads are taken from the first write, so the cache fits autocast, sharded
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
        """Store k and v (B, S, K, D) and return views of all so far, (B, K, T, D). If v is k (MLA), store it once.

        Raises ValueError when the cache is full or the batch is not that of the first write.
        """
        size, total = k.size(1), self.length + k.size(1)
        if total > self.max_length:
            rule = f"of the KV cache must be at least {total}, the tokens to store"
            raise invalid("max_length", "full", self.max_length, rule, "make it longer")

        if self.keys is None or self.values is None:
            self.keys = self._allocate(k)
            self.values = self.keys if v is k else self._allocate(v)
        if k.size(0) != self.keys.size(0):
            rule = f"must have the {self.keys.size(0)} sequences of the KV cache"
            raise invalid("k", "batch", tuple(k.shape), rule, "use a new cache for another batch")

        # a cache has no gradient: generation is without grad, and a graph would grow with each token
        self.keys[:, :, self.length : total] = k.detach().transpose(1, 2)
        if v is not k:
            self.values[:, :, self.length : total] = v.detach().transpose(1, 2)
        self.length += size
        return self.keys[:, :, :total], self.values[:, :, :total]

    def _allocate(self, t: Tensor) -> Tensor:
        return t.new_empty(t.size(0), t.size(2), self.max_length, t.size(3))

    def first(self, ctx: TokenContext, batch: int, size: int) -> tuple[int, list[int]]:
        """Return the number of stored tokens, and where the document of each sequence's first new token began."""
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

        stored: of an empty cache, cached in place of k and v (latents of MLA); later calls then give k and v in its
        form. Keys outside of a window stay stored. A `ctx.mask` applies to the first tokens. Raises ValueError for a
        spec with a mask of its own: a token cannot see later ones.
        """
        require_causal(spec)
        batch, size = q.shape[:2]
        past = self.length
        keys, values = self.append(*(stored or (k, v)))

        if past == 0 and ctx.mask is not None:
            out = ctx.mask.attend(q, k, v, spec, sinks)
        elif past == 0:
            plan = ctx.segments() or SegmentPlan.of_lengths([[size]] * batch)
            out = attend_documents(q, k, v, plan, spec, sinks)
        else:
            starts = self._starts(ctx, batch, size)
            query = q.transpose(1, 2)  # (B, H, S, D)
            out = _attend_past(query, keys, values, starts, past, ctx, spec, sinks).transpose(1, 2)
        if self._owns_history:
            self.history.advance(ctx.document_ids, batch, size)
        return out


def require_causal(spec: AttentionSpec) -> None:
    """Raise ValueError for an attention that a cache cannot compute."""
    if spec.mask != "causal":
        rule = "is not computed with a KV cache, where a token sees only earlier ones"
        fix = "score full sequences without a cache, or use 'causal'"
        raise invalid("attention.mask", "unsupported", spec.mask, rule, fix)


def _attend_past(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: list[list[int]],
    past: int,
    ctx: TokenContext,
    spec: AttentionSpec,
    sinks: Tensor | None,
) -> Tensor:
    """New tokens after `past` cached ones: q (B, H, S, D), k and v (B, K, T, D) -> (B, H, S, D).

    One call for one token per sequence; else one call for each distinct range of keys.
    """
    if q.size(2) == 1:
        oldest = 0 if spec.window is None else past + 1 - spec.window
        reach = [max(firsts[0], oldest) for firsts in starts]
        low = min(reach)

        def reached() -> Tensor:  # (B, 1, 1, T): a query sees one row of keys, nothing quadratic
            begin = torch.tensor(reach).to(q.device, non_blocking=True)
            return torch.arange(low, past + 1, device=q.device) >= begin[:, None, None, None]

        equal = max(reach) == low
        mask = None if equal else ctx.once(("one token", q.device, spec.window), reached)
        return attend_masked(q, k[:, :, low:], v[:, :, low:], mask, spec, sinks)

    # sequences by (start, stop, first): new tokens [start, stop) that see the keys from `first` on
    groups: dict[tuple[int, int, int], list[int]] = {}
    for sequence, firsts in enumerate(starts):
        begins = [past, *firsts[1:]]
        for first, start, stop in zip(firsts, begins, [*begins[1:], past + q.size(2)]):
            groups.setdefault((start, stop, first), []).append(sequence)

    out = torch.empty_like(q)
    for (start, stop, first), members in groups.items():
        batch: slice | Tensor = slice(None)
        if len(members) < q.size(0):  # as an index a list is copied with a wait
            batch = torch.tensor(members).to(q.device, non_blocking=True)
        low = first if spec.window is None else max(first, start + 1 - spec.window)
        new = slice(start - past, stop - past)
        index = torch.arange(low, stop, device=q.device)
        mask = visible(index[start - low :], index, spec.window)  # (new, visible)
        keys, values = (t[batch][:, :, low:stop] for t in (k, v))
        seen = attend_masked(q[batch][:, :, new], keys, values, mask, spec, sinks)
        out[batch, :, new] = seen
    return out


class KVCache:
    """Past keys and values of a model, for sequences that grow by the same number of tokens per call.

        cache = KVCache(max_length=1024); logits = model(prompt, cache=cache)

    Memory: 2 * layers * B * max_length * K * D elements (latent attention: layers * B * max_length times the
    width of a latent and the rotated dims), allocated layer by layer at the first call in the dtype and on the
    device of the keys.
    """

    def __init__(self, max_length: int) -> None:
        if max_length < 1:
            fix = "give the longest sequence"
            raise invalid("max_length", "range", max_length, "must be at least 1", fix)
        self.max_length = max_length
        self.history = History()
        self.layers: dict[str, LayerCache] = {}

    @property
    def length(self) -> int:
        """Number of stored tokens per sequence."""
        return self.history.length

    def layer(self, key: str) -> LayerCache:
        """Return the cache of one layer, created at the first request."""
        if key not in self.layers:
            self.layers[key] = LayerCache(self.max_length, self.history)
        return self.layers[key]
