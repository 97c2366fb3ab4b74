"""Context parallelism: the tokens of each row are sharded over ranks, and attention exchanges keys and values.

Everything but attention works on tokens one by one. Each rank gets its chunks of tokens, labels (shifted
before), positions and document ids from `cut_sequence`; `context_parallel` replaces the attention.

Shapes: B rows, S tokens of a row, W ranks, s = S / W tokens here, H query heads, K key/value heads, D
width of a head.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from forge_parallel._shared.problems import Problem, invalid, raise_problems
from forge_parallel._torch_compat import disable_compile, start_all_gather
from forge_parallel.axes.blockwise import blockwise_attention
from forge_parallel.axes.key_exchange import AllGather, Ring, chunks_of, join_parts, local_chunks
from forge_parallel.axes.local import add_mixin
from forge_parallel.axes.tiles import Tile, Tiling
from forge_parallel.axes.window import Keys, Queries, earlier_tiles, own_tiles
from forge_parallel.legal import uneven_sequence
from forge_parallel.order import mark

M = TypeVar("M", bound=nn.Module)
#: Argument of a model's forward that gets the document ids of whole rows (B, S), where `document_ids` are cut.
ROW_DOCUMENT_IDS = "row_document_ids"
#: Begins and ends of the documents of each row.
Rows = list[list[tuple[int, int]]]
#: Fields of an attention's spec that may be off their defaults.
_COMPUTED = ("scale", "window")
_EXCHANGES: dict[str, Any] = {"all_gather": AllGather, "ring": Ring}


def cut_sequence(x: Tensor, axis: Any, dim: int = 1) -> Tensor:
    """This rank's chunks of x (B, S, ...), those numbered r and 2 W - 1 - r of 2 W: (B, s, ...).

        tokens, labels = cut_sequence(tokens, meshes.cp), cut_sequence(labels, meshes.cp)

    Shift labels before. `axis` has rank, size and group; x itself where size is 1. No communication.
    Raises ValueError where S is not divisible by 2 W.
    """
    if axis.size == 1:
        return x
    if wrong := uneven_sequence(x.size(dim), cp=axis.size):
        raise_problems("", [wrong])
    return local_chunks(x, axis.rank, axis.size, dim)


def join_sequence(x: Tensor, axis: Any, dim: int = 1) -> Tensor:
    """Whole rows (B, S, ...) on every rank from each one's `cut_sequence`: x (B, s, ...), no gradient.

    For logits of an evaluation, for example. One all-gather.
    """
    if axis.size == 1:
        return x.detach()
    parts = start_all_gather(x.detach(), axis.size, axis.group.group_name)()
    return join_parts(parts.unflatten(0, (axis.size, -1)), dim % x.dim())


def context_parallel(
    model: M, axis: Any, exchange: Literal["all_gather", "ring"] = "all_gather"
) -> M:
    """Let the attention of `model` reach over the ranks of `axis`; returns the same model.

        model = context_parallel(model, meshes.cp)          # axis: rank, size, group
        logits = model(cut_sequence(tokens, meshes.cp), positions=cut_sequence(positions, meshes.cp))

    Sets `module.attend` on every module that has this attribute: a callable (q (B, s, H, D), k, v
    (B, s, K, D), ctx) -> like q that is causal within the row, or within the document of
    `ctx.document_ids` (B, s), which are cut as tokens are; scores by D ** -0.5 or a scale of its own, all keys or those
    of a sliding window, no bias. The replaced callable must compute the same and declare it (see `attention_problems`); a scale is a
    factor of q, which in 16 bits rounds once more. No other module may mix the tokens of a row.
    A model whose forward has `positions` may take document_ids of whole rows (B, S) instead, on the host: the
    model sees its part of them, and those of whole rows too if its forward has `row_document_ids`; the tiles are
    computed from whole rows.

    Costs of each attention: `AllGather` is one all-gather and one reduce-scatter, `Ring` W - 1 exchanges in
    forward and 2 W - 1 in backward. Document ids of whole rows cost nothing more; with
    ids that are cut there is one more all-gather of (B, s) integers and a host copy per forward, shared by
    the layers through `ctx.once(key, make)`; without `once`, per layer. Recomputation repeats forward's. In a window
    only what it reaches is computed, and all keys travel.

    If the model's forward has a parameter `positions`, each call must pass it: tokens of a rank do not start at
    position 0. Raises ValueError if no module has `attend`, one does not declare to be causal, or `exchange` is
    unknown.
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
        add_mixin(model, _RowsOverRanks)
        model.cp_arguments, model.cp_attention = arguments, attention  # type: ignore[assignment]
    return model


def attention_problems(model: nn.Module) -> list[Problem]:
    """Reasons why a model's attention cannot be computed over cp ranks, for each layer and field.

    `module.attend` declares its computation by `spec`, a dataclass whose defaults mean plain causal attention inside
    of documents with scores by D ** -0.5; or by `is_causal = True` that it is exactly that.
    """
    offers = {name: m.attend for name, m in model.named_modules() if hasattr(m, "attend")}
    kind = type(model).__name__
    if not offers:
        rule = f"must be an attribute attend(q, k, v, ctx) of a module of {kind} to reach over ranks, and is of none"
        return [Problem("attend", "missing", ..., rule, "give its attention one, or use cp 1")]
    needed = {*getattr(model, "mask_inputs", ())} & {*getattr(model, "extra_inputs", ())}
    rule = f"of {kind} lets tokens of whole rows see each other, and ranks of cp have parts of rows"
    problems = [Problem(name, "mask_inputs", ..., rule, "use cp 1") for name in sorted(needed)]
    causal = "must be causal attention inside of documents with scores by D ** -0.5, which cp puts in its place"
    computed = (
        "is not computed over the ranks of cp, where attention is causal, with a scale and a window"
    )
    for name, attend in offers.items():
        key, spec = f"{name}.attend", getattr(attend, "spec", None)
        if spec is None and not getattr(attend, "is_causal", False):
            fix = "give the function is_causal = True if it is, or use cp 1"
            problems.append(Problem(key, "causal", ..., f"{causal}, and does not say so", fix))
        for f in () if spec is None else dataclasses.fields(spec):
            if f.name not in _COMPUTED and (value := getattr(spec, f.name)) != f.default:
                fix = f"use cp 1, or {f.name} {f.default!r}"
                problems.append(Problem(f"{key}.{f.name}", "spec", value, computed, fix))
    return problems


class Place(NamedTuple):
    """What tiles depend on beside documents: `length` tokens of a row are here, on `rank` of `size`."""

    length: int
    rank: int
    size: int
    exchange: str
    window: int | None = None


class Span(NamedTuple):
    """Local queries [query, query + size) of a row (None: every row): [start, start + size) in the row.

    They see one another causally, and all keys of the row in [first, start).
    """

    row: int | None
    query: int
    size: int
    start: int
    first: int

    @property
    def queries(self) -> Queries:
        """They alone."""
        return Queries(self.row, self.start, self.size, self.query)


class ContextAttention:
    """The replacement for a module's `attend`."""

    is_causal = True
    scale: float | None = None  # None: D ** -0.5
    window: int | None = None  # None: all of the document

    def __init__(self, axis: Any, exchange: str) -> None:
        self.axis, self.name = axis, exchange
        self.exchange = _EXCHANGES[exchange](axis)
        self._rows = WeakTensorKeyDictionary()  # this rank's document ids -> those of whole rows

    def in_place_of(self, attend: Any) -> ContextAttention:
        """This one with the scale and window of `attend`; rows and exchange are shared."""
        spec = getattr(attend, "spec", None)
        scale, window = (getattr(spec, name, None) for name in _COMPUTED)
        if scale is None and window is None:
            return self
        other = copy.copy(self)
        other.scale, other.window = scale, window
        return other

    def __deepcopy__(self, memo: Any) -> ContextAttention:
        return self  # process groups cannot be copied, and copies of a model share them

    def part_of_rows(self, ids: Tensor) -> Tensor:
        """This rank's part of the document ids (B, S) of whole rows, for which a plan needs no exchange."""
        part = cut_sequence(ids, self.axis)
        self._rows[part] = ids
        return part

    def prepare(self, ctx: Any, x: Tensor) -> None:
        """Compute the tiles of packed rows before the first block."""
        if ctx.document_ids is not None:
            self._tiling(ctx, x.device)

    @disable_compile  # host integers change with every batch
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, ctx: Any = None) -> Tensor:
        ids = getattr(ctx, "document_ids", None)
        if ids is None:
            tiling = whole_rows_tiling(self._place(q.size(1)))
        elif ids.shape != q.shape[:2]:
            rule = f"must be cut as tokens are, to {tuple(q.shape[:2])}"
            fix = "use cut_sequence(document_ids, axis), or give those of whole rows"
            raise invalid("document_ids", "shape", tuple(ids.shape), rule, fix)
        else:
            tiling = self._tiling(ctx, q.device)
        if self.scale is not None:  # kernels scale by D ** -0.5, so q takes the rest of the factor
            q = q * (self.scale * q.size(-1) ** 0.5)
        return blockwise_attention(q, k, v, tiling, self.exchange)

    @property
    def ranks_of_row(self) -> int:
        """The ranks that share the tokens of a row."""
        return int(self.axis.size)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Scaled products of this rank's queries with the keys of whole rows: q (B, s, H, D), k (B, s, K, D) ->
        (B, H, s, S), fp32 at least, without gradients. One all-gather of k.

        `scores`, `softmax` and `mix` compute attention from its definition, for who looks into it (forge_core.interp).
        """
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
            rule = "of tokens that lie on several ranks have no gradient"
            fix = "call the model under torch.no_grad(), or use cp 1"
            raise invalid("scores", "gradient", ..., rule, fix)
        scale = q.size(-1) ** -0.5 if self.scale is None else self.scale
        wide = torch.promote_types(q.dtype, torch.float32)
        keys = _of_queries(join_sequence(k.contiguous(), self.axis).to(wide), q.size(2))
        return q.to(wide).transpose(1, 2) @ keys.permute(0, 2, 3, 1) * scale

    def softmax(self, scores: Tensor, ctx: Any = None, sinks: Tensor | None = None) -> Tensor:
        """The weights of `scores`: causal, within documents and the window. No sinks, which cp refuses."""
        seen = self._visible(ctx, scores.size(-1), scores.device)  # (B or 1, s, S)
        return scores.masked_fill(~seen.unsqueeze(1), -torch.inf).softmax(-1)

    def mix(self, weights: Tensor, v: Tensor) -> Tensor:
        """The output (B, s, H, D) of `weights` (B, H, s, S), v (B, s, K, D) of this rank. One all-gather of v."""
        values = join_sequence(v.contiguous(), self.axis).to(weights.dtype)
        values = _of_queries(values, weights.size(1))
        return torch.einsum("bhst,bthd->bshd", weights, values).to(v.dtype)

    def _visible(self, ctx: Any, length: int, device: torch.device) -> Tensor:
        keys = torch.arange(length, device=device)
        behind = cut_sequence(keys, self.axis, dim=0)[:, None] - keys  # (s, S)
        seen = (behind >= 0) & (behind < (self.window or length))
        ids = getattr(ctx, "document_ids", None)
        if ids is None:
            return seen[None]
        number = torch.zeros(len(ids), length, dtype=torch.int64)
        for row, borders in enumerate(self._documents(ctx, device)):
            for n, (begin, end) in enumerate(borders):
                number[row, begin:end] = n
        number = number.to(device)
        return seen & (cut_sequence(number, self.axis)[:, :, None] == number[:, None, :])

    def _place(self, length: int) -> Place:
        return Place(length, self.axis.rank, self.axis.size, self.name, self.window)

    def _tiling(self, ctx: Any, device: torch.device) -> Tiling:
        def make() -> Tiling:
            found = self._documents(ctx, device)
            return packed_tiling(found, self._place(ctx.document_ids.size(1)))

        tiling: Tiling = _once(ctx, ("tiles", id(self.exchange), self.window), make)
        return tiling

    def _documents(self, ctx: Any, device: torch.device) -> Rows:
        def make() -> Rows:
            ids = self._rows.get(ctx.document_ids)
            if ids is None or ids.device.type != "cpu":
                ids = join_sequence(ctx.document_ids.to(device), self.axis).cpu()
            return documents(ids)

        found: Rows = _once(ctx, ("documents", id(self.exchange)), make)
        return found


def _once(ctx: Any, key: Any, make: Callable[[], Any]) -> Any:
    """`make()`, once per forward if the context can keep it."""
    keep = getattr(ctx, "once", None)
    return make() if keep is None else keep(key, make)


def _of_queries(x: Tensor, heads: int) -> Tensor:
    """Keys or values (B, S, K, D) for each query head: (B, S, H, D)."""
    return x.repeat_interleave(heads // x.size(2), dim=2)


def documents(ids: Tensor) -> Rows:
    """Begin and end of the documents of each row of ids (B, S) on the host: a change is a border."""
    borders: list[list[int]] = [[0] for _ in range(ids.size(0))]
    for row, before in (ids[:, 1:] != ids[:, :-1]).nonzero().tolist():
        borders[row].append(before + 1)
    return [list(pairwise([*starts, ids.size(1)])) for starts in borders]


@functools.lru_cache(maxsize=64)
def whole_rows_tiling(place: Place) -> Tiling:
    """Tiles of rows that are one document."""
    return _tiling_of({None: [(0, place.length * place.size)]}, place)


def packed_tiling(rows: Rows, place: Place) -> Tiling:
    """Tiles of rows given as the begins and ends of their documents."""
    if all(len(row) == 1 for row in rows):
        return whole_rows_tiling(place)
    return _tiling_of(dict(enumerate(rows)), place)


def _tiling_of(rows: Mapping[Any, Sequence[tuple[int, int]]], place: Place) -> Tiling:
    """`rows` by number, or None for all of them alike."""
    chunk = place.length // 2
    spans = []
    for n, number in enumerate(chunks_of(place.rank, place.size)):
        low, high = number * chunk, (number + 1) * chunk
        for row, borders in rows.items():
            for first, end in borders:
                start, stop = max(first, low), min(end, high)
                if start < stop:
                    spans.append(Span(row, n * chunk + start - low, stop - start, start, first))
    return Tiling(_PARTS[place.exchange](spans, place))


def _on_own_keys(spans: Sequence[Span], window: int | None) -> list[Tile]:
    if window is None:
        return [Tile(s.row, s.query, s.size, s.query, s.size, True) for s in spans]
    return [tile for s in spans for tile in own_tiles(s.queries, window)]


def _on_earlier_keys(span: Span, keys: Keys, window: int | None) -> Iterable[Tile]:
    if window is not None:
        return earlier_tiles(span.queries, keys, window)
    if keys.low >= keys.high:
        return ()
    return [Tile(span.row, span.query, span.size, keys.at, keys.high - keys.low, False)]


def _gathered_parts(spans: Sequence[Span], place: Place) -> tuple[list[Tile], ...]:
    """Tiles on own keys, and of all earlier keys on keys of whole rows."""
    window, before = place.window, list[Tile]()
    for s in spans:
        before += _on_earlier_keys(s, Keys(s.first, s.start, s.first), window)
    return _on_own_keys(spans, window), before


def _ring_parts(spans: Sequence[Span], place: Place) -> tuple[list[Tile], ...]:
    """Tiles of the keys of rank r, r - 1, ...; those of own positions are in the first part."""
    size, window = place.size, place.window
    parts = [_on_own_keys(spans, window), *(list[Tile]() for _ in range(size - 1))]
    for step, part in enumerate(parts):
        chunks = chunks_of((place.rank - step) % size, size)
        for s in spans:
            for keys in _held(s, chunks, place.length // 2, window is None):
                part += _on_earlier_keys(s, keys, window)
    return tuple(parts)


def _held(span: Span, chunks: tuple[int, int], chunk: int, joined: bool) -> list[Keys]:
    """The keys in [first, start) that a rank with these chunks holds; `joined`, which needs no window, as one run.

    They lie side by side there: a query that sees keys of a later chunk sees all of an earlier one to its end.
    """
    found = []
    for n, number in enumerate(chunks):
        low, high = max(span.first, number * chunk), min(span.start, (number + 1) * chunk)
        if low < high:
            found.append(Keys(low, high, n * chunk + low - number * chunk, turn=n))
    if joined and found:
        keys = sum(each.high - each.low for each in found)
        return [Keys(0, keys, found[0].at)]
    return found


_PARTS = {"all_gather": _gathered_parts, "ring": _ring_parts}


class _RowsOverRanks:
    """A model whose rows do not start at position 0, and which may take document ids of whole rows."""

    cp_arguments: list[str]
    cp_attention: ContextAttention

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(self.cp_arguments, args)) | kwargs
        if given.get("positions") is None and given.get("cache") is None:
            rule = "must be given where a sequence is on several ranks, as they do not count from 0"
            fix = "pass positions=cut_sequence(positions, axis)"
            raise invalid("positions", "missing", ..., rule, fix)
        ids, attention = given.get("document_ids"), self.cp_attention
        if ids is not None and given.get("cache") is None:
            here = given["positions"].size(-1)  # a stage's stream may be cut by tp besides
            if ids.size(-1) == here * attention.axis.size:
                given["document_ids"] = attention.part_of_rows(ids)
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
