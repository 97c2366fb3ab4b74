"""Context parallelism: the tokens of each sequence are sharded over ranks, and attention exchanges keys and values.

Everything but attention works on tokens one by one. Each rank gets its chunks of tokens, labels (shifted
before), positions and document ids from `shard_sequence`; `context_parallel` replaces the attention.

    rank 0 of 2: chunks 0 and 3        chunk   0   1   2   3
    rank 1 of 2: chunks 1 and 2        rank    0   1   1   0       so that causal attention is equal work

Shapes: B sequences, S tokens of a sequence, W ranks, s = S / W tokens here, H query heads, K key/value heads, D
width of a head.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from forge_parallel._renamed import renamed
from forge_parallel._shared.problems import invalid, raise_problems
from forge_parallel._torch_compat import disable_compile, start_all_gather
from forge_parallel.axes.blockwise import (
    AllGather,
    Ring,
    Tile,
    Tiling,
    blockwise_attention,
    chunks_of,
    gather_chunks,
    local_chunks,
    repeat_heads,
    scaled_scores,
)
from forge_parallel.axes.local import add_mixin
from forge_parallel.check_model import attention_problems
from forge_parallel.rules import uneven_sequence
from forge_parallel.structure import mark

M = TypeVar("M", bound=nn.Module)
#: Argument of a model's forward that gets the document ids of full sequences (B, S), where `document_ids` are sharded.
ROW_DOCUMENT_IDS = "row_document_ids"
#: Begins and ends of the documents of each sequence.
Documents = list[list[tuple[int, int]]]
_EXCHANGES: dict[str, Any] = {"all_gather": AllGather, "ring": Ring}


def shard_sequence(x: Tensor, axis: Any, dim: int = 1) -> Tensor:
    """This rank's chunks of x (B, S, ...), those numbered r and 2 W - 1 - r of 2 W: (B, s, ...).

        tokens, labels = shard_sequence(tokens, meshes.cp), shard_sequence(labels, meshes.cp)

    Shift labels before. `axis` has rank, size and group; x itself where size is 1. No communication.
    Raises ValueError where S is not divisible by 2 W.
    """
    if axis.size == 1:
        return x
    if wrong := uneven_sequence(x.size(dim), cp=axis.size):
        raise_problems("", [wrong])
    return local_chunks(x, axis.rank, axis.size, dim)


def gather_sequence(x: Tensor, axis: Any, dim: int = 1) -> Tensor:
    """Full sequences (B, S, ...) on every rank from each one's `shard_sequence`: x (B, s, ...), no gradient.

    For logits of an evaluation, for example. One all-gather.
    """
    if axis.size == 1:
        return x.detach()
    shards = start_all_gather(x.detach(), axis.size, axis.group.group_name)()
    return gather_chunks(shards.unflatten(0, (axis.size, -1)), dim % x.dim())


def context_parallel(
    model: M, axis: Any, exchange: Literal["all_gather", "ring"] = "all_gather"
) -> M:
    """Let the attention of `model` reach over the ranks of `axis`; returns the same model.

        model = context_parallel(model, meshes.cp)          # axis: rank, size, group
        logits = model(shard_sequence(tokens, meshes.cp), positions=shard_sequence(positions, meshes.cp))

    Sets `module.attend` on every module that has this attribute: a callable (q (B, s, H, D), k, v
    (B, s, K, D), ctx) -> like q that is causal within the sequence, or within the document of
    `ctx.document_ids` (B, s), which are sharded as tokens are; scores by D ** -0.5 or a scale of its own, all keys or
    those of a sliding window, no bias. The replaced callable must compute the same and declare it (see
    `check_model.attention_problems`); a scale is a factor of q, which in 16 bits rounds once more. No other module may
    mix the tokens of a sequence.

    A model whose forward has `positions` may take document_ids of full sequences (B, S) instead, on the host: the
    model sees its shard of them, and those of full sequences too if its forward has `row_document_ids`; the tiles are
    computed from full sequences. If the forward has `positions`, each call must pass it: tokens of a rank do not start
    at position 0.

    Costs of each attention: `AllGather` is one all-gather and one reduce-scatter, `Ring` W - 1 exchanges in
    forward and 2 W - 1 in backward. Document ids of full sequences cost nothing more; with sharded ids there is one
    more all-gather of (B, s) integers and a host copy per forward, shared by
    the layers through `ctx.once(key, make)`; without `once`, per layer. Recomputation repeats forward's. In a window
    only reachable tiles are computed, and all keys travel.

    Raises ValueError if no module has `attend`, one does not declare to be causal, or `exchange` is unknown.
    """
    if exchange not in _EXCHANGES:
        fix = f"use {' or '.join(_EXCHANGES)}"
        raise invalid("exchange", "unknown", exchange, "is unknown", fix)
    raise_problems("", attention_problems(model))
    if axis.size == 1:
        return model

    mark(model, "context")
    attention = ContextAttention(axis, exchange)
    for module in model.modules():
        if hasattr(module, "attend"):
            module.attend = attention.in_place_of(module.attend)  # type: ignore[assignment]  # no module
    arguments = arguments_with_positions(model)
    if arguments:
        add_mixin(model, _ShardedModel)
        model.cp_arguments, model.cp_attention = arguments, attention  # type: ignore[assignment]
    return model


class ContextAttention:
    """The replacement for a module's `attend`."""

    is_causal = True
    scale: float | None = None  # None: D ** -0.5
    window: int | None = None  # None: all of the document

    def __init__(self, axis: Any, exchange: str) -> None:
        self.axis, self.name = axis, exchange
        self.exchange = _EXCHANGES[exchange](axis)
        self._full_ids = WeakTensorKeyDictionary()  # document ids: sharded -> of full sequences

    def in_place_of(self, attend: Any) -> ContextAttention:
        """This one with the scale and window of `attend`; document ids and exchange are shared."""
        spec = getattr(attend, "spec", None)
        scale, window = getattr(spec, "scale", None), getattr(spec, "window", None)
        if scale is None and window is None:
            return self
        other = copy.copy(self)
        other.scale, other.window = scale, window
        return other

    def __deepcopy__(self, memo: Any) -> ContextAttention:
        return self  # process groups cannot be copied, and copies of a model share them

    def shard_ids(self, ids: Tensor) -> Tensor:
        """This rank's shard of the document ids (B, S) of full sequences, whose tiles then need no exchange."""
        shard = shard_sequence(ids, self.axis)
        self._full_ids[shard] = ids
        return shard

    def prepare(self, ctx: Any, x: Tensor) -> None:
        """Compute the tiles of packed sequences before the first block."""
        if ctx.document_ids is not None:
            self._tiling(ctx, x.device)

    @disable_compile  # host integers change with every batch
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, ctx: Any = None) -> Tensor:
        ids = getattr(ctx, "document_ids", None)
        if ids is None:
            tiling = one_document_tiling(self._shard(q.size(1)))
        elif ids.shape != q.shape[:2]:
            rule = f"must be cut as tokens are, to {tuple(q.shape[:2])}"
            fix = "use shard_sequence(document_ids, axis), or give those of full sequences"
            raise invalid("document_ids", "shape", tuple(ids.shape), rule, fix)
        else:
            tiling = self._tiling(ctx, q.device)
        if self.scale is not None:  # kernels scale by D ** -0.5, so q takes the rest of the factor
            q = q * (self.scale * q.size(-1) ** 0.5)
        return blockwise_attention(q, k, v, tiling, self.exchange)

    @property
    def ranks_of_row(self) -> int:
        """The ranks that share the tokens of a sequence."""
        return int(self.axis.size)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Scores of this rank's queries with the keys of full sequences: q (B, s, H, D), k (B, s, K, D) ->
        (B, H, s, S), fp32 at least, without gradients. One all-gather of k.

        `scores`, `softmax` and `mix` compute attention from its definition, for hooks (forge_core.interp).
        """
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
            rule = "of tokens that lie on several ranks have no gradient"
            fix = "call the model under torch.no_grad(), or use cp 1"
            raise invalid("scores", "gradient", ..., rule, fix)
        keys = repeat_heads(gather_sequence(k.contiguous(), self.axis), q.size(2))  # (B, H, S, D)
        scale = q.size(-1) ** -0.5 if self.scale is None else self.scale
        return scaled_scores(q.transpose(1, 2), keys, scale)

    def softmax(self, scores: Tensor, ctx: Any = None, sinks: Tensor | None = None) -> Tensor:
        """The weights of `scores`: causal, within documents and the window. Sinks raise under cp."""
        seen = self._visible(ctx, scores.size(-1), scores.device)  # (B or 1, s, S)
        return scores.masked_fill(~seen.unsqueeze(1), -torch.inf).softmax(-1)

    def mix(self, weights: Tensor, v: Tensor) -> Tensor:
        """The output (B, s, H, D) of `weights` (B, H, s, S), v (B, s, K, D) of this rank. One all-gather of v."""
        values = gather_sequence(v.contiguous(), self.axis).to(weights.dtype)
        values = repeat_heads(values, weights.size(1))  # (B, H, S, D)
        return torch.einsum("bhst,bhtd->bshd", weights, values).to(v.dtype)

    def _visible(self, ctx: Any, length: int, device: torch.device) -> Tensor:
        """Which keys each query sees: (B or 1, s, S)."""
        keys = torch.arange(length, device=device)
        distance = shard_sequence(keys, self.axis, dim=0)[:, None] - keys  # (s, S)
        seen = (distance >= 0) & (distance < (self.window or length))
        if getattr(ctx, "document_ids", None) is None:
            return seen[None]
        number = document_numbers(self._ids_on_host(ctx, device)).to(device)
        return seen & (shard_sequence(number, self.axis)[:, :, None] == number[:, None, :])

    def _shard(self, length: int) -> SequenceShard:
        """This rank's position, for tilings of `length` tokens here."""
        return SequenceShard(length, self.axis.rank, self.axis.size, self.name, self.window)

    def _tiling(self, ctx: Any, device: torch.device) -> Tiling:
        """The tiles of packed sequences, once per forward and window."""

        def make() -> Tiling:
            found = documents(self._ids_on_host(ctx, device))
            return packed_tiling(found, self._shard(ctx.document_ids.size(1)))

        tiling: Tiling = _once(ctx, ("tiles", id(self.exchange), self.window), make)
        return tiling

    def _ids_on_host(self, ctx: Any, device: torch.device) -> Tensor:
        """Document ids of full sequences (B, S) on the host."""

        def make() -> Tensor:
            ids: Tensor | None = self._full_ids.get(ctx.document_ids)
            if ids is None or ids.device.type != "cpu":
                ids = gather_sequence(ctx.document_ids.to(device), self.axis).cpu()
            return ids

        found: Tensor = _once(ctx, ("documents", id(self.exchange)), make)
        return found


def _once(ctx: Any, key: Any, make: Callable[[], Any]) -> Any:
    """`make()`, once per forward if the context can keep it."""
    keep = getattr(ctx, "once", None)
    return make() if keep is None else keep(key, make)


def document_starts(ids: Tensor) -> Tensor:
    """Whether each token but the first of a sequence begins a document, (B, S) ids -> (B, S - 1): a change of id does."""
    return ids[:, 1:] != ids[:, :-1]


def document_numbers(ids: Tensor) -> Tensor:
    """Number of each token's document in its sequence (B, S): ids themselves may come again."""
    return torch.nn.functional.pad(document_starts(ids).cumsum(1), (1, 0))


def documents(ids: Tensor) -> Documents:
    """Begin and end of the documents of each sequence, of ids (B, S) on the host."""
    starts: list[list[int]] = [[0] for _ in range(ids.size(0))]
    for sequence, before in document_starts(ids).nonzero().tolist():
        starts[sequence].append(before + 1)
    return [list(pairwise([*each, ids.size(1)])) for each in starts]


class SequenceShard(NamedTuple):
    """All that tiles depend on besides documents: `length` tokens of a sequence are here, on `rank` of `size`."""

    length: int
    rank: int
    size: int
    exchange: str
    window: int | None = None

    @property
    def reach(self) -> int:
        """The window, or the full sequence."""
        return self.length * self.size if self.window is None else self.window


class SequenceChunk(NamedTuple):
    """Queries [start, start + size) of a sequence (None: every sequence), the first of which lies at `at` in the tensor.

    They see one another causally, and all keys of their document, [document, start).
    """

    sequence: int | None
    at: int
    size: int
    start: int
    document: int


class Keys(NamedTuple):
    """Keys [low, high) of a sequence, of which the first lies at `at` in the tensor; those of one part have one `turn`."""

    low: int
    high: int
    at: int
    turn: int = 0


@functools.lru_cache(maxsize=64)
def one_document_tiling(shard: SequenceShard) -> Tiling:
    """Tiles of sequences that are one document each."""
    return _tiling_of({None: [(0, shard.length * shard.size)]}, shard)


def packed_tiling(sequences: Documents, shard: SequenceShard) -> Tiling:
    """Tiles of sequences given as the begins and ends of their documents."""
    if all(len(each) == 1 for each in sequences):
        return one_document_tiling(shard)
    return _tiling_of(dict(enumerate(sequences)), shard)


def _tiling_of(sequences: Mapping[Any, Sequence[tuple[int, int]]], shard: SequenceShard) -> Tiling:
    """`sequences` by number, or None for all of them alike."""
    size = shard.length // 2
    chunks = []
    for n, number in enumerate(chunks_of(shard.rank, shard.size)):
        low, high = number * size, (number + 1) * size
        for sequence, boundaries in sequences.items():
            for begin, end in boundaries:
                start, stop = max(begin, low), min(end, high)
                if start < stop:
                    at = n * size + start - low
                    chunks.append(SequenceChunk(sequence, at, stop - start, start, begin))
    return Tiling(_PARTS[shard.exchange](chunks, shard))


def _gathered_parts(
    chunks: Sequence[SequenceChunk], shard: SequenceShard
) -> tuple[list[Tile], ...]:
    """Tiles on own keys, and of all earlier keys on keys of full sequences."""
    earlier = [
        tile
        for c in chunks
        for tile in _earlier_tiles(c, Keys(c.document, c.start, c.document), shard.reach)
    ]
    return _own_tiles(chunks, shard.reach), earlier


def _ring_parts(chunks: Sequence[SequenceChunk], shard: SequenceShard) -> tuple[list[Tile], ...]:
    """Tiles of the keys of rank r, r - 1, ...; those of own positions are in the first part."""
    parts = [_own_tiles(chunks, shard.reach), *(list[Tile]() for _ in range(shard.size - 1))]
    for step, part in enumerate(parts):
        held = chunks_of((shard.rank - step) % shard.size, shard.size)
        for chunk in chunks:
            for keys in _keys_on_rank(chunk, held, shard.length // 2, shard.window is None):
                part += _earlier_tiles(chunk, keys, shard.reach)
    return tuple(parts)


_PARTS = {"all_gather": _gathered_parts, "ring": _ring_parts}


def _keys_on_rank(
    queries: SequenceChunk, chunks: tuple[int, int], size: int, merge: bool
) -> list[Keys]:
    """The keys in [document, start) that a rank with these chunks holds; with `merge`, which needs no window, as one run.

    They are next to each other there: a query that sees keys of a later chunk sees all of an earlier one to its end.
    """
    found = []
    for n, number in enumerate(chunks):
        low, high = max(queries.document, number * size), min(queries.start, (number + 1) * size)
        if low < high:
            found.append(Keys(low, high, n * size + low - number * size, turn=n))
    if merge and found:
        return [Keys(0, sum(each.high - each.low for each in found), found[0].at)]
    return found


# Tiles of a sliding window: the band below the diagonal, divided so that kernels know every tile.
#
# A query at position p sees the keys p - window + 1 to p. Queries are taken in runs of at most `window`. The keys
# that the first query of a run sees and the last no longer does are a triangle: the later the query, the fewer it
# sees. With queries and keys both read backwards that triangle is the causal one.


def _own_tiles(chunks: Sequence[SequenceChunk], window: int) -> list[Tile]:
    """Tiles of queries with the keys at their own positions."""
    found = []
    for chunk in chunks:
        for run in _runs(chunk, window):
            found.append(Tile(run.sequence, run.at, run.size, run.at, run.size, True))
            found += _band(run, Keys(chunk.start, run.start, chunk.at), window)
    return found


def _earlier_tiles(queries: SequenceChunk, keys: Keys, window: int) -> Iterator[Tile]:
    """Tiles of queries with keys that are all before the first of them."""
    for run in _runs(queries, window):
        yield from _band(run, keys, window)


def _runs(chunk: SequenceChunk, window: int) -> Iterator[SequenceChunk]:
    """Runs of at most `window` queries."""
    for begin in range(0, chunk.size, window):
        size, start, at = min(window, chunk.size - begin), chunk.start + begin, chunk.at + begin
        yield chunk._replace(at=at, size=size, start=start)


def _band(run: SequenceChunk, keys: Keys, window: int) -> Iterator[Tile]:
    """Tiles of one run: of each query the keys from `first` on, its own distance to the run's begin added."""
    first = run.start - window + 1  # the first key that the first query sees
    full_from = max(keys.low, first + run.size - 1)  # from here on every query of the run sees them
    low, high = max(keys.low, first), min(keys.high, full_from)
    edge = max(0, high - low)  # width of the triangle
    before = low - first if edge else 0  # queries before the triangle, which see all of it

    def full(begin: int, end: int, key: int) -> Iterator[Tile]:
        if begin < end and key < keys.high:
            at, size = keys.at + key - keys.low, keys.high - key
            yield Tile(run.sequence, run.at + begin, end - begin, at, size, False, turn=keys.turn)

    yield from full(0, before, low)
    yield from full(before, run.size, full_from)
    if edge:
        at = keys.at + low - keys.low
        yield Tile(run.sequence, run.at + before, edge, at, edge, True, True, keys.turn)


class _ShardedModel:
    """A model whose sequences do not start at position 0, and which may take document ids of full sequences."""

    cp_arguments: list[str]
    cp_attention: ContextAttention

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(self.cp_arguments, args)) | kwargs
        if given.get("positions") is None and given.get("cache") is None:
            rule = "must be given where a sequence is on several ranks, as they do not count from 0"
            fix = "pass positions=shard_sequence(positions, axis)"
            raise invalid("positions", "missing", ..., rule, fix)
        ids, attention = given.get("document_ids"), self.cp_attention
        if ids is not None and given.get("cache") is None:
            here = given["positions"].size(-1)  # tp may shard a stage's stream further
            if ids.size(-1) == here * attention.axis.size:
                given["document_ids"] = attention.shard_ids(ids)
                if ROW_DOCUMENT_IDS in self.cp_arguments:
                    given[ROW_DOCUMENT_IDS] = ids
                return super().forward(**given)  # type: ignore[misc]
        return super().forward(*args, **kwargs)  # type: ignore[misc]


def arguments_with_positions(model: nn.Module) -> list[str]:
    """Names of its forward's arguments, if `positions` is among them.

    Mixins (`add_mixin`) take any arguments, so the signature of the class below counts.
    """
    written = (vars(cls)["forward"] for cls in type(model).__mro__ if "forward" in vars(cls))
    named = (list(inspect.signature(forward).parameters)[1:] for forward in written)
    return next((names for names in named if "positions" in names), [])


__getattr__ = functools.partial(renamed, __name__)
