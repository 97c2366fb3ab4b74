"""A model with other values inside: patching, ablation, steering."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from forge_core.interp.points import chosen, visited

#: Of a value and the name of its point, the value in its place: same shape, dtype and device.
Change = Callable[[Tensor, str], Tensor]


@contextmanager
def intervene(model: nn.Module, changes: Mapping[str, Change]) -> Iterator[None]:
    """Inside of it calls of `model` compute with changed values.

        with intervene(model, {"layers.2.head_out": lambda x, name: x * keep}):   # keep (H, 1): ablated heads
            logits = model(tokens)

    The keys are patterns of points (see `forge_core.interp.points`), and gradients go through. Where a point matches
    several patterns, their changes follow one another. A change that returns its argument changes nothing. That of
    `attn_scores` or `attn_weights` computes attention from its definition, with all (B, H, S, S) weights.

    The values are those of this process: parts of rows or heads where ranks share them. A recomputed forward
    (activation checkpointing) calls a change again. Cost: that of the changes.

    Raises ValueError for a pattern without a point, a value of other shape, dtype or device, a point in compiled code,
    and at the end for a point that no call has reached.
    """
    change = _Changes(changes)
    places = chosen(model, changes)
    with visited(places, change):
        yield
    missing = [name for name in places if name not in change.reached]
    if missing:
        raise ValueError(
            f"point {missing[0]} must be reached by a call inside intervene, and was not; call the model there, in "
            "whole rows without a cache for attn_scores and attn_weights"
        )


class _Changes:
    changes = True

    def __init__(self, changes: Mapping[str, Change]) -> None:
        self._changes = dict(changes)
        self.reached: set[str] = set()

    def reserve(self, name: str, shape: torch.Size, dtype: torch.dtype) -> None:
        pass

    def visit(self, name: str, value: Tensor) -> Tensor:
        self.reached.add(name)
        for pattern, change in self._changes.items():
            if fnmatchcase(name, pattern):
                value = _same_kind(name, value, change(value, name))
        return value


def _same_kind(name: str, old: Tensor, new: Tensor) -> Tensor:
    for what in ("shape", "dtype", "device"):
        wanted, found = getattr(old, what), getattr(new, what, None)
        if wanted != found:
            raise ValueError(
                f"the change of {name} returned {what} {found}, it must be {wanted}; return a tensor like the value"
            )
    return new
