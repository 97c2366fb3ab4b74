"""Change activations of a model: patching, ablation, steering."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from forge_core._shared.names import matches
from forge_core._shared.problems import invalid
from forge_core.interp import points
from forge_core.interp.points import HookPoint, Whole

#: From a value and the name of its hook point to the new value: same shape, dtype and device.
Change = Callable[[Tensor, str], Tensor]


@contextmanager
def intervene(
    model: nn.Module, changes: Mapping[str, Change], *, whole: Whole | None = None
) -> Iterator[None]:
    """Calls of `model` inside this context compute with changed values.

        with intervene(model, {"layers.2.head_out": lambda x, name: x * keep}):   # keep (H, 1): ablated heads
            logits = model(tokens)

    The keys are patterns of hook points (see `forge_core.interp.points`). Gradients pass through changes. If a hook point
    matches several patterns, their changes follow one another. A change may write in place and return its argument.
    A change of `attn_scores` or `attn_weights` computes attention from its definition, with all (B, H, S, S) weights.

    The values are those of this process: shards where ranks share sequences or heads. With `whole`
    (`forge_parallel.points.UnshardedPoints`) a change gets full values on each of these ranks, must return the same on all of
    them, and has no gradient; each rank continues with its shard. Ranks of a pipeline call the changes of their own
    blocks. A recomputed forward (activation checkpointing) calls a change again. Cost: that of the changes, and with
    `whole` one gather of the value for each axis that shards it.

    Raises ValueError for a pattern without a hook point, a value of other shape, dtype or device, a hook point in
    compiled code, with `whole` in a call with gradients, and at the end for a hook point that no call has reached.
    """
    _, hooks = points.select_hooks(model, changes, whole)
    change = _Changes(changes, hooks, whole)
    begin = model.register_forward_pre_hook(change.on_forward_begin, with_kwargs=True, prepend=True)
    try:
        with points.visited(hooks, change):
            yield
    finally:
        begin.remove()

    missing = [name for name in hooks if name not in change.reached]
    if missing:
        rule = "must be reached by a call inside intervene, and was not"
        fix = "call the model there, on full sequences without a cache for attn_scores and attn_weights"
        raise invalid(missing[0], "not_reached", ..., rule, fix)


class _Changes:
    """The visitor that applies changes to the values of hook points."""

    changes = True

    def __init__(
        self, changes: Mapping[str, Change], hooks: dict[str, HookPoint], whole: Whole | None
    ) -> None:
        self._changes, self._hooks, self._whole = dict(changes), hooks, whole
        self.reached: set[str] = set()
        self._batch = 0

    def on_forward_begin(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._batch = points.batch_size(module, args, kwargs)

    def reserve(self, name: str, shape: torch.Size, dtype: torch.dtype) -> None:
        pass

    def visit(self, name: str, value: Tensor) -> Tensor:
        self.reached.add(name)
        if self._whole is None:
            return self._changed(name, value)
        if value.requires_grad:
            rule = "is spread over ranks, and its change has no gradient"
            raise invalid(name, "gradient", ..., rule, "call the model under torch.no_grad()")

        hook, value_of_batch = self._hooks[name], points.batch_first(value, self._batch)
        full = self._whole.join(hook, value_of_batch)
        changed = self._changed(name, full)
        if changed is full:
            return value
        if full.shape != value_of_batch.shape:  # else no rank holds only a shard
            changed = self._whole.cut(hook, changed)
        return changed.reshape(value.shape)

    def _changed(self, name: str, value: Tensor) -> Tensor:
        """Apply the changes of all patterns that match, in their order."""
        for pattern, change in self._changes.items():
            if matches(name, [pattern]):
                before = _version(value)
                new = _same_kind(name, value, change(value, name))
                # another object after a change in place: callers compare by `is`
                value = new.view_as(new) if new is value and _version(value) != before else new
        return value


def _version(value: Tensor) -> object:
    """A number that changes with each write in place; in inference mode, where torch does not count them, never equal."""
    return object() if value.is_inference() else value._version


def _same_kind(name: str, old: Tensor, new: Tensor) -> Tensor:
    """`new`; ValueError unless it has the shape, dtype and device of `old`."""
    for what in ("shape", "dtype", "device"):
        wanted, found = getattr(old, what), getattr(new, what, None)
        if wanted != found:
            rule = f"is the {what} that the change of {name} returned, and must be {wanted}"
            shown = tuple(found) if isinstance(found, torch.Size) else found
            raise invalid(name, what, shown, rule, "return a tensor like the value")
    return new
