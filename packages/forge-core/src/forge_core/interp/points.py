"""Hook points of a model: their names, and the visitors that read or change their values.

    layers.3.resid_pre, resid_post    (B, S, M)  the residual stream before and after a block
    layers.3.attn_out, mlp_out        (B, S, M)  the output of a sublayer, after its norm and scale
    layers.3.resid_mid                (B, S, M)  resid_pre + attn_out
    layers.3.q, k, v                  (B, S, H or K, D)  normed and rotated
    layers.3.attn_scores              (B, H, S, S)  scaled q k, before soft-cap, mask and sinks
    layers.3.attn_weights             (B, H, S, S)  after the softmax
    layers.3.head_out                 (B, S, H, D)  attn_weights v, before the output projection
    layers.3.mlp_hidden               (B, S, F)  the input of the last projection of a dense feed-forward
    layers.3.router_logits            (B * S, E)  of a mixture of experts; (B, S, E) in a store, and with `whole`
    final_norm, logits                (B, S, M), (B, S, V)

Modules of multi-token prediction (MTP) run only in calls with its tokens, so their hook points need a pattern of their
own: "mtp.*".

A custom module has a tuple `points`, and passes its tensors through `self.point(name, value)` (see
`forge_core.model.points`).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from forge_core._shared.names import match_names, nearest_names
from forge_core._shared.problems import invalid
from forge_core.model.context import TokenContext

#: Computed next to the attention, if its `attend` defines these methods, as `LocalAttention` does.
_OF_ATTEND = ("attn_scores", "attn_weights")
_ATTEND_METHODS = ("scores", "softmax", "mix")
#: Modules of multi-token prediction, which do not run in every call.
_MTP = "mtp."


class Visitor(Protocol):
    """Reads or changes the values of hook points."""

    #: Whether `visit` may return another value: then the attention is computed with gradients.
    changes: bool

    def reserve(self, name: str, shape: torch.Size, dtype: torch.dtype) -> None:
        """Called before a value is computed only for visitors; may raise."""

    def visit(self, name: str, value: Tensor) -> Tensor:
        """Return the value with which the model continues."""


class HookPoint(NamedTuple):
    """A module of a model, and its value: input, output, a method of `attend`, or a value that passes `point`."""

    path: str
    module: nn.Module
    kind: str  # "input", "output", "attend", or "point"
    point: str


class Whole(Protocol):
    """Gathers the full values of hook points that are sharded; all ranks that share a value call every method alike.

    `forge_parallel.points.UnshardedPoints` implements it.
    """

    def names(self, here: list[str]) -> list[str]:
        """Return the hook points of all ranks, given those of this rank's pipeline stage."""

    def check(self, name: str, place: Any) -> None:
        """ValueError for a hook point whose placement is unknown."""

    def join(self, place: Any, part: Tensor) -> Tensor:
        """Gather the full value of this rank's shard, without graph; dim 0 is the batch."""

    def cut(self, place: Any, value: Tensor) -> Tensor:
        """Return this rank's shard of a full value."""

    def exchange(
        self, found: dict[str, list[Tensor]], max_bytes: int | None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the values of other pipeline stages' hook points, given those of this one.

        ValueError, on all ranks, if all values have more than `max_bytes`.
        """


def points_of(model: nn.Module) -> dict[str, HookPoint]:
    """Return the hook points of a model by name: residual streams, then those inside the blocks, then the model's output.

    A hook point inside a block has the name of the block, or that of its module where two modules of the block have it.
    ValueError for a model without any.
    """
    blocks = _blocks(model)
    found: dict[str, HookPoint] = {}
    inside: dict[str, list[HookPoint]] = {}
    for path, module in model.named_modules():
        if path in blocks:
            found[f"{path}.resid_pre"] = HookPoint(path, module, "input", "resid_pre")
            found[f"{path}.resid_post"] = HookPoint(path, module, "output", "resid_post")
        block = next((b for b in blocks if path == b or path.startswith(f"{b}.")), path)
        for own in _own(path, module):
            inside.setdefault(_dotted(block, own.point), []).append(own)

    for name, same in inside.items():
        found |= {name if len(same) == 1 else _dotted(p.path, p.point): p for p in same}
    norm = getattr(model, "norm", None)
    if isinstance(norm, nn.Module) and blocks:
        found["final_norm"] = HookPoint("norm", norm, "output", "final_norm")
        found["logits"] = HookPoint("", model, "output", "logits")
    if not found:
        rule = f"of type {type(model).__name__} must have blocks or modules with `points`"
        raise invalid("model", "missing", ..., rule, "see forge_core.interp")
    return found


def select_hooks(
    model: nn.Module, patterns: Iterable[str], whole: Whole | None = None
) -> tuple[list[str], dict[str, HookPoint]]:
    """Return the names that match a pattern on any rank, and the hook points of this rank's pipeline stage among them.

    Patterns are as in fnmatch; `*` also stands for dots. A pattern that matches others does not select those of `mtp`.

    ValueError for a pattern that matches nothing, a hook point inside compiled code, and one that `whole` does not know.
    """
    here = points_of(model)
    known = list(here) if whole is None else whole.names(list(here))
    found = set[str]()
    for pattern in patterns:
        names = match_names([pattern], known)
        if not names:
            rule = f"must match one of the {len(known)} hook points of {type(model).__name__}"
            fix = f"near: {', '.join(nearest_names(pattern, known))}"
            raise invalid(pattern, "not_found", ..., rule, fix)
        found |= {*(name for name in names if not name.startswith(_MTP))} or {*names}

    selected = {name: hook for name, hook in here.items() if name in found}
    _require_eager(model, selected)
    if whole is not None:
        for name, hook in selected.items():
            whole.check(name, hook)
    return [name for name in known if name in found], selected


@contextmanager
def visited(hooks: dict[str, HookPoint], visitor: Visitor) -> Iterator[None]:
    """Pass the values of hook points to a visitor, after earlier visitors; undone exactly at the end."""
    with ExitStack() as stack:
        for name, hook in hooks.items():
            stack.callback(_attach(hook, name, visitor))
        yield


def batch_size(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """B of a model's call: dim 0 of the first tensor in the order of the arguments of its forward."""
    order = [*inspect.signature(module.forward).parameters]
    named = sorted(kwargs, key=lambda name: order.index(name) if name in order else len(order))
    given = (*args, *(kwargs[name] for name in named))
    return next(value.size(0) for value in given if isinstance(value, Tensor))


def batch_first(value: Tensor, batch: int) -> Tensor:
    """A value with the batch as dim 0: (B * S, E) of routers as (B, S, E)."""
    return value if value.size(0) == batch else value.unflatten(0, (batch, -1))


def _blocks(model: nn.Module) -> list[str]:
    """Names of the blocks of a model, by its method `blocks`."""
    method = getattr(model, "blocks", None)
    blocks: list[nn.Module] = method() if callable(method) else []
    ids = {id(block) for block in blocks}
    return [name for name, module in model.named_modules() if id(module) in ids]


def _own(path: str, module: Any) -> Iterator[HookPoint]:
    """Hook points that a module itself has."""
    if not callable(getattr(module, "point", None)):
        return
    for point in getattr(module, "points", ()):
        yield HookPoint(path, module, "point", point)
    attend = getattr(module, "attend", None)
    if all(hasattr(attend, method) for method in _ATTEND_METHODS):
        for point in _OF_ATTEND:
            yield HookPoint(path, module, "attend", point)


def _dotted(path: str, point: str) -> str:
    """The name of a hook point of the module at `path`."""
    return f"{path}.{point}" if path else point


def _require_eager(model: nn.Module, hooks: dict[str, HookPoint]) -> None:
    """ValueError for a hook point inside compiled code."""
    # nn.Module.compile, compile_blocks of forge-parallel, torch.compile(module)
    modules = dict(model.named_modules())
    compiled = {
        path
        for path, module in modules.items()
        if getattr(module, "_compiled_call_impl", None) is not None
        or getattr(module, "compiled", None) is not None
        or hasattr(module, "_orig_mod")
    }

    for name, hook in hooks.items():
        steps = hook.path.split(".") if hook.path else []
        around = ["", *(".".join(steps[: i + 1]) for i in range(len(steps)))]
        within = next((path for path in around if path in compiled), None)
        if within is not None:
            rule = f"is inside of compiled code ({within or 'the model'}), which has no such tensor"
            fix = "load the model without torch.compile"
            raise invalid(name, "compiled", ..., rule, fix)


def _attach(hook: HookPoint, name: str, visitor: Visitor) -> Callable[[], None]:
    """Attach a visitor to a hook point; return the function that removes it."""
    module: Any = hook.module
    if hook.kind == "input":

        def before(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (visitor.visit(name, args[0]), *args[1:])

        remove: Callable[[], None] = module.register_forward_pre_hook(before).remove
        return remove
    if hook.kind == "output":

        def after(_: Any, __: Any, out: Tensor) -> Tensor:
            return visitor.visit(name, out)

        remove = module.register_forward_hook(after).remove
        return remove

    visit = (hook.point, name, visitor)
    if hook.kind == "attend":
        return _watch(module, "attend", _WatchedAttention, visit)
    return _watch(module, "point", _WatchedPoint, visit)


#: A hook point of a module, its name in the model, and its visitor.
_Visit = tuple[str, str, Visitor]


def _watch(module: Any, name: str, kind: type[_Watched], visit: _Visit) -> Callable[[], None]:
    """Replace `module.point` or `module.attend` by a watched one, until its last visitor is removed."""
    watched = getattr(module, name)
    if not isinstance(watched, kind):
        watched = kind(watched, name in vars(module))
        setattr(module, name, watched)
    watched.visits.append(visit)

    def restore() -> None:
        watched.visits.remove(visit)
        if watched.visits:
            return
        delattr(module, name)
        if watched.own:
            setattr(module, name, watched.plain)

    return restore


class _Watched:
    """Replaces `plain`, and passes values to visitors; a copy of the model has the plain one."""

    def __init__(self, plain: Any, own: bool) -> None:
        self.plain = plain
        self.own = own  # whether it was an attribute of the instance, not of the class
        self.visits: list[_Visit] = []

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self.plain, memo)

    def _visit(self, point: str, value: Tensor) -> Tensor:
        """Pass a value to the visitors of a hook point, one after another."""
        for at, name, visitor in self.visits:
            if at == point:
                value = visitor.visit(name, value)
        return value


class _WatchedPoint(_Watched):
    """`point` of a module, with visitors."""

    def __call__(self, point: str, value: Tensor) -> Tensor:
        return self._visit(point, self.plain(point, value))


class _WatchedAttention(_Watched):
    """Attention with visitors of its scores and weights. If none changes a value, the plain kernel computes the output."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, ctx: TokenContext, sinks: Tensor | None = None
    ) -> Tensor:
        given = () if sinks is None else (sinks,)
        keys = q.size(1) * self.plain.ranks_of_row
        shape = torch.Size((q.size(0), q.size(2), q.size(1), keys))
        dtype = torch.promote_types(q.dtype, torch.float32)

        # (B, H, S, S) may not fit: visitors raise before it is computed
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
        """Weights (B, H, S, S) after all visits; None if no visitor has changed scores or weights."""
        scores = self.plain.scores(q, k)
        seen = self._visit("attn_scores", scores)
        if seen is scores and all(point != "attn_weights" for point, _, _ in self.visits):
            return None
        weights = self.plain.softmax(seen, ctx, sinks)
        changed = self._visit("attn_weights", weights)
        return None if seen is scores and changed is weights else changed
