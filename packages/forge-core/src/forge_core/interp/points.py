"""The named places of a model, and who looks in there.

    layers.3.resid_pre, resid_post    (B, S, M)  the stream before and behind a block
    layers.3.attn_out, mlp_out        (B, S, M)  what a sublayer adds to it, behind its norm and scale
    layers.3.resid_mid                (B, S, M)  resid_pre + attn_out
    layers.3.q, k, v                  (B, S, H or K, D)  normed and turned
    layers.3.attn_scores              (B, H, S, S)  scaled q k, before soft-cap, mask and sinks
    layers.3.attn_weights             (B, H, S, S)  behind the softmax
    layers.3.head_out                 (B, S, H, D)  attn_weights v, before the output projection
    layers.3.mlp_hidden               (B, S, F)  what the last projection of a dense feed-forward reads
    layers.3.router_logits            (B * S, E)  of a mixture of experts; (B, S, E) in a store, and with `whole`
    final_norm, logits                (B, S, M), (B, S, V)

Modules of multi-token prediction run where a call has tokens ahead, so their points need a pattern of their own: "mtp.*".

A part of your own has a tuple `points`, and passes its tensors through `self.point(name, value)` (see
`forge_core.model.points`).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from forge_core._shared.problems import invalid
from forge_core.model.context import TokenContext

#: Computed beside the attention, where its `attend` offers what they are made by, as `LocalAttention` does.
_OF_ATTEND = ("attn_scores", "attn_weights")
#: Modules that calls without tokens ahead do not run.
_AHEAD = "mtp."
_OFFERS = ("scores", "softmax", "mix")


class Visitor(Protocol):
    """Who reads or changes values of points."""

    changes: bool

    def reserve(self, name: str, shape: torch.Size, dtype: torch.dtype) -> None:
        """Called before a value is computed for visitors alone; may raise."""

    def visit(self, name: str, value: Tensor) -> Tensor:
        """The value that takes the place of `value`."""


class Place(NamedTuple):
    """Where a point is: a module, and what of it."""

    path: str
    module: nn.Module
    kind: str  # "input", "output", "attend", or "point"
    point: str


class Whole(Protocol):
    """The whole values of points of which ranks have parts; every method is called by all of these ranks alike.

    `forge_parallel.points.WholePoints` is one.
    """

    def names(self, here: list[str]) -> list[str]:
        """The points of all ranks, given those of this rank's part of the model."""

    def check(self, name: str, place: Any) -> None:
        """ValueError for a point whose parts it does not know."""

    def join(self, place: Any, part: Tensor) -> Tensor:
        """The whole value, without graph, of this rank's part; rows come first."""

    def cut(self, place: Any, value: Tensor) -> Tensor:
        """This rank's part of a whole value."""

    def exchange(
        self, found: dict[str, list[Tensor]], max_bytes: int | None
    ) -> Iterator[tuple[str, Tensor]]:
        """The values of other ranks' points, one after another, given those of this rank's. ValueError, on all ranks,
        if those of all are more than `max_bytes`."""


def points_of(model: nn.Module) -> dict[str, Place]:
    """The points of a model by name: streams of the blocks, then what is inside of them, then the end of the model.

    A point inside a block has the name of the block, or that of its module where two parts of the block have it.
    ValueError for a model without any.
    """
    blocks = _blocks(model)
    found: dict[str, Place] = {}
    inside: dict[str, list[Place]] = {}
    for path, module in model.named_modules():
        if path in blocks:
            found[f"{path}.resid_pre"] = Place(path, module, "input", "resid_pre")
            found[f"{path}.resid_post"] = Place(path, module, "output", "resid_post")
        block = next((b for b in blocks if path == b or path.startswith(f"{b}.")), path)
        for place in _own(path, module):
            inside.setdefault(_join(block, place.point), []).append(place)
    for name, places in inside.items():
        alone = len(places) == 1
        found |= {name if alone else _join(p.path, p.point): p for p in places}
    norm = getattr(model, "norm", None)
    if isinstance(norm, nn.Module) and blocks:
        found["final_norm"] = Place("norm", norm, "output", "final_norm")
        found["logits"] = Place("", model, "output", "logits")
    if not found:
        rule = f"of type {type(model).__name__} must have blocks or modules with `points`"
        raise invalid("model", "missing", ..., rule, "see forge_core.interp")
    return found


def chosen(
    model: nn.Module, patterns: Iterable[str], whole: Whole | None = None
) -> tuple[list[str], dict[str, Place]]:
    """The points that match one of the patterns (as in fnmatch; `*` stands for dots too), and those of them that are here
    and not in another rank's part of the model. A pattern that matches others does not take those of `mtp`.

    ValueError for a pattern that matches nothing, for a point inside of compiled code, and for one that `whole` does
    not know.
    """
    here = points_of(model)
    points = list(here) if whole is None else whole.names(list(here))
    found = set[str]()
    for pattern in patterns:
        names = [name for name in points if fnmatchcase(name, pattern)]
        if not names:
            near = get_close_matches(pattern, points, 3, 0.5) or points[:3]
            rule = f"must match one of the {len(points)} points of {type(model).__name__}"
            raise invalid(pattern, "not_found", ..., rule, f"near: {', '.join(near)}")
        found |= {*(name for name in names if not name.startswith(_AHEAD))} or {*names}
    places = {name: place for name, place in here.items() if name in found}
    _refuse_compiled(model, places)
    if whole is not None:
        for name, place in places.items():
            whole.check(name, place)
    return [name for name in points if name in found], places


@contextmanager
def visited(places: dict[str, Place], visitor: Visitor) -> Iterator[None]:
    """Hand the values of places to a visitor, behind those that visit already; undone exactly at the end."""
    with ExitStack() as stack:
        for name, place in places.items():
            stack.callback(_hook(place, name, visitor))
        yield


def rows_of(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """B of the arguments of a model's call: the rows of the first tensor in the order of its forward."""
    order = [*inspect.signature(module.forward).parameters]
    named = sorted(kwargs, key=lambda name: order.index(name) if name in order else len(order))
    given = (*args, *(kwargs[name] for name in named))
    return next(value.size(0) for value in given if isinstance(value, Tensor))


def in_rows(value: Tensor, rows: int) -> Tensor:
    """A value with rows first: (B * S, E) of routers as (B, S, E)."""
    return value if value.size(0) == rows else value.unflatten(0, (rows, -1))


def _blocks(model: nn.Module) -> list[str]:
    offer = getattr(model, "blocks", None)
    blocks: list[nn.Module] = offer() if callable(offer) else []
    ids = {id(block) for block in blocks}
    return [name for name, module in model.named_modules() if id(module) in ids]


def _own(path: str, module: Any) -> Iterator[Place]:
    if not callable(getattr(module, "point", None)):
        return
    for point in getattr(module, "points", ()):
        yield Place(path, module, "point", point)
    attend = getattr(module, "attend", None)
    if all(hasattr(attend, offer) for offer in _OFFERS):
        for point in _OF_ATTEND:
            yield Place(path, module, "attend", point)


def _join(path: str, point: str) -> str:
    return f"{path}.{point}" if path else point


def _refuse_compiled(model: nn.Module, places: dict[str, Place]) -> None:
    # nn.Module.compile, compile_blocks of forge-parallel, torch.compile(module)
    modules = dict(model.named_modules())
    compiled = {
        path
        for path, module in modules.items()
        if getattr(module, "_compiled_call_impl", None) is not None
        or getattr(module, "compiled", None) is not None
        or hasattr(module, "_orig_mod")
    }
    for name, place in places.items():
        parts = place.path.split(".") if place.path else []
        above = ["", *(".".join(parts[: i + 1]) for i in range(len(parts)))]
        within = next((path for path in above if path in compiled), None)
        if within is not None:
            rule = f"is inside of compiled code ({within or 'the model'}), which has no such tensor"
            fix = "load the model without torch.compile"
            raise invalid(name, "compiled", ..., rule, fix)


def _hook(place: Place, name: str, visitor: Visitor) -> Callable[[], None]:
    """Attach a visitor to a place; returns what takes it away."""
    module: Any = place.module
    if place.kind == "input":

        def before(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (visitor.visit(name, args[0]), *args[1:])

        remove: Callable[[], None] = module.register_forward_pre_hook(before).remove
        return remove
    if place.kind == "output":

        def behind(_: Any, __: Any, out: Tensor) -> Tensor:
            return visitor.visit(name, out)

        remove = module.register_forward_hook(behind).remove
        return remove
    visit = (place.point, name, visitor)
    if place.kind == "attend":
        return _watch(module, "attend", _WatchedAttention, visit)
    return _watch(module, "point", _WatchedPoint, visit)


#: A point of a module, its name in the model, who visits it.
_Visit = tuple[str, str, Visitor]


def _watch(module: Any, offer: str, kind: type[_Watched], visit: _Visit) -> Callable[[], None]:
    """Put something watched in the place of `module.point` or `module.attend`, until its last visitor has left."""
    watched = getattr(module, offer)
    if not isinstance(watched, kind):
        watched = kind(watched, offer in vars(module))
        setattr(module, offer, watched)
    watched.visits.append(visit)

    def restore() -> None:
        watched.visits.remove(visit)
        if watched.visits:
            return
        delattr(module, offer)
        if watched.own:
            setattr(module, offer, watched.plain)

    return restore


class _Watched:
    """What stands in the place of `plain`, and hands values to visitors; a copy of the model has the plain one."""

    def __init__(self, plain: Any, own: bool) -> None:
        self.plain, self.own = plain, own  # whether the instance had it, or its class
        self.visits: list[_Visit] = []

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self.plain, memo)

    def _visit(self, point: str, value: Tensor) -> Tensor:
        for at, name, visitor in self.visits:
            if at == point:
                value = visitor.visit(name, value)
        return value


class _WatchedPoint(_Watched):
    """`point` of a module, whose values visitors see."""

    def __call__(self, point: str, value: Tensor) -> Tensor:
        return self._visit(point, self.plain(point, value))


class _WatchedAttention(_Watched):
    """Attention whose scores and weights visitors see. What nobody changes is computed as without them."""

    def __getattr__(self, name: str) -> Any:  # what else the attention says of itself
        return getattr(self.plain, name)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, ctx: TokenContext, sinks: Tensor | None = None
    ) -> Tensor:
        given = () if sinks is None else (sinks,)
        keys = q.size(1) * self.plain.ranks_of_row
        shape = torch.Size((q.size(0), q.size(2), q.size(1), keys))
        dtype = torch.promote_types(q.dtype, torch.float32)
        for _, name, visitor in self.visits:
            visitor.reserve(name, shape, dtype)
        graph = torch.is_grad_enabled() and any(visitor.changes for _, _, visitor in self.visits)
        with torch.set_grad_enabled(graph):
            weights = self._changed_weights(q, k, ctx, sinks)
        out: Tensor = (
            self.plain(q, k, v, ctx, *given) if weights is None else self.plain.mix(weights, v)
        )
        return out

    def _changed_weights(
        self, q: Tensor, k: Tensor, ctx: TokenContext, sinks: Tensor | None
    ) -> Tensor | None:
        """Weights (B, H, S, S) after all visits; None where they are those of the plain attention."""
        scores = self.plain.scores(q, k)
        seen = self._visit("attn_scores", scores)
        if seen is scores and all(point != "attn_weights" for point, _, _ in self.visits):
            return None
        weights = self.plain.softmax(seen, ctx, sinks)
        behind = self._visit("attn_weights", weights)
        return None if seen is scores and behind is weights else behind
