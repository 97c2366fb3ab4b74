"""A model with other values inside: patching, ablation, steering."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from forge_core._shared.problems import invalid
from forge_core.interp.points import Place, Whole, chosen, in_rows, rows_of, visited

#: Of a value and the name of its point, the value in its place: same shape, dtype and device.
Change = Callable[[Tensor, str], Tensor]


@contextmanager
def intervene(
    model: nn.Module, changes: Mapping[str, Change], *, whole: Whole | None = None
) -> Iterator[None]:
    """Inside of it calls of `model` compute with changed values.

        with intervene(model, {"layers.2.head_out": lambda x, name: x * keep}):   # keep (H, 1): ablated heads
            logits = model(tokens)

    The keys are patterns of points (see `forge_core.interp.points`), and gradients go through. Where a point matches
    several patterns, their changes follow one another. A change may write in place and return its argument. That of
    `attn_scores` or `attn_weights` computes attention from its definition, with all (B, H, S, S) weights.

    The values are those of this process: parts of rows or heads where ranks share them. With `whole`
    (`forge_parallel.points.WholePoints`) a change gets whole values on each of these ranks, must return the same on all
    of them, and has no gradient; each rank goes on with its part. Ranks of a pipeline call the changes of their own
    blocks. A recomputed forward (activation checkpointing) calls a change again. Cost: that of the changes, and with
    `whole` one gather of the value for each axis that shares it.

    Raises ValueError for a pattern without a point, a value of other shape, dtype or device, a point in compiled code,
    with `whole` in a call with gradients, and at the end for a point that no call has reached.
    """
    _, places = chosen(model, changes, whole)
    change = _Changes(changes, places, whole)
    begin = model.register_forward_pre_hook(change.begin, with_kwargs=True, prepend=True)
    try:
        with visited(places, change):
            yield
    finally:
        begin.remove()
    missing = [name for name in places if name not in change.reached]
    if missing:
        rule = "must be reached by a call inside intervene, and was not"
        fix = "call the model there, in whole rows without a cache for attn_scores and attn_weights"
        raise invalid(missing[0], "not_reached", ..., rule, fix)


class _Changes:
    changes = True

    def __init__(
        self, changes: Mapping[str, Change], places: dict[str, Place], whole: Whole | None
    ) -> None:
        self._changes, self._places, self._whole = dict(changes), places, whole
        self.reached: set[str] = set()
        self._rows = 0

    def begin(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._rows = rows_of(module, args, kwargs)

    def reserve(self, name: str, shape: torch.Size, dtype: torch.dtype) -> None:
        pass

    def visit(self, name: str, value: Tensor) -> Tensor:
        self.reached.add(name)
        if self._whole is None:
            return self._changed(name, value)
        if value.requires_grad:
            rule = "is spread over ranks, and its change has no gradient"
            raise invalid(name, "gradient", ..., rule, "call the model under torch.no_grad()")
        place, by_row = self._places[name], in_rows(value, self._rows)
        joined = self._whole.join(place, by_row)
        changed = self._changed(name, joined)
        if changed is joined:
            return value
        if joined.shape != by_row.shape:  # or the value was whole already
            changed = self._whole.cut(place, changed)
        return changed.reshape(value.shape)

    def _changed(self, name: str, value: Tensor) -> Tensor:
        for pattern, change in self._changes.items():
            if fnmatchcase(name, pattern):
                before = _version(value)
                new = _same_kind(name, value, change(value, name))
                # whoever compares by `is` sees a change in place, too
                value = new.view_as(new) if new is value and _version(value) != before else new
        return value


def _version(value: Tensor) -> object:
    """Equal to the one before while nothing is written in place; never equal where torch does not count that."""
    return object() if value.is_inference() else value._version


def _same_kind(name: str, old: Tensor, new: Tensor) -> Tensor:
    for what in ("shape", "dtype", "device"):
        wanted, found = getattr(old, what), getattr(new, what, None)
        if wanted != found:
            rule = f"is the {what} that the change of {name} returned, and must be {wanted}"
            shown = tuple(found) if isinstance(found, torch.Size) else found
            raise invalid(name, what, shown, rule, "return a tensor like the value")
    return new
