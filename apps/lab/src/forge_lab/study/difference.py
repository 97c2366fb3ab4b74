"""The first place where two records differ, in the order in which a step computes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from forge_lab._shared.problems import invalid
from forge_lab.study.record import Part, Record
from forge_train.errors import ConfigError

#: Relative bound for records of different layouts or devices, which add in another order.
BOUND = 1e-3
_ZERO = 1e-5  # a gradient below this share of the largest one is rounding

Values = dict[tuple[int, int], list[Part]]


@dataclass(frozen=True)
class Difference:
    """The first difference of two replays.

    `quantity`: "weight" (before the step), "instances" (their numbers), "data" (what is in them), "output", "loss",
    "gradient", "grad_norm" or "lr". `name` is a parameter, a field of the batch, or a module, "" for a number of the row; `others` are the names of the same quantity that differ
    in this step, too. `error` is max|a - b| / max|b|, of samples; `instance` a row whose output differs.
    """

    step: int
    quantity: str
    name: str = ""
    error: float | None = None
    instance: int | None = None
    others: list[str] = field(default_factory=list)
    values: tuple[Any, Any] | None = None


def same_layout(a: Record, b: Record) -> bool:
    """Whether both were computed in the same way: as many ranks, the same [parallel], the same kind of device."""
    return all(getattr(a.head, k) == getattr(b.head, k) for k in ("world_size", "layout", "device"))


def bound_of(a: Record, b: Record, tolerance: float | None) -> float:
    """The bound of a comparison: 0, which compares bits, for records of one layout, unless one is given."""
    if tolerance is not None:
        return tolerance
    return 0.0 if same_layout(a, b) else BOUND


def first_difference(a: Record, b: Record, tolerance: float | None = None) -> Difference | None:
    """The first difference of the steps that both have; None if there is none within `tolerance` (see `bound_of`).

    In each step: weights before it, instances and their content, outputs in the order of the forward, the loss, gradients in the order of
    the backward, their norm, the rate; behind the last step weights again. ConfigError where no step is in both.
    """
    bound, same = bound_of(a, b, tolerance), same_layout(a, b)
    first, last = max(a.head.first, b.head.first), min(a.head.last, b.head.last)
    if first > last:
        rule = f"has steps {b.head.first} to {b.head.last}, and {a.folder} {a.head.first} to {a.head.last}"
        fix = "record steps that are in both"
        raise invalid("run_b", "common", str(b.folder), rule, fix, kind=ConfigError)
    for step in range(first, last + 2):
        found = next(_of_step(a, b, step, bound, same, step > last), None)
        if found is not None:
            return found
    return None


def _of_step(
    a: Record, b: Record, step: int, bound: float, same: bool, only_weights: bool
) -> Iterator[Difference]:
    yield from _tensors(a, b, step, "weight", bound, same)
    if only_weights:
        return
    rows = a.row(step), b.row(step)
    yield from _number(step, "instances", rows, 0.0)
    yield from _tensors(a, b, step, "data", 0.0, same)
    yield from _tensors(a, b, step, "output", bound, same)
    yield from _number(step, "loss", rows, bound)
    yield from _tensors(a, b, step, "gradient", bound, same)
    yield from _number(step, "grad_norm", rows, bound)
    yield from _number(step, "lr", rows, bound)


def _number(
    step: int, name: str, rows: tuple[Mapping[str, Any], Mapping[str, Any]], bound: float
) -> Iterator[Difference]:
    one, two = (row.get(name) for row in rows)
    if not close(one, two, bound):
        yield Difference(step, name, values=(one, two))


def close(one: Any, two: Any, bound: float) -> bool:
    """Whether numbers are within a relative bound; 0, and anything that is no number, compares for equality."""
    if bound and isinstance(one, float) and isinstance(two, float):
        return abs(one - two) <= bound * max(abs(one), abs(two))
    return bool(one == two)


def _tensors(
    a: Record, b: Record, step: int, kind: str, bound: float, same: bool
) -> Iterator[Difference]:
    """The first name that differs: of outputs in the order of the forward, of gradients the other way round."""
    ours, theirs = a.entries(step, kind), b.entries(step, kind)
    names = [name for name in ours if name in theirs]
    if kind == "weight":
        _refuse_other_models(a, b, ours, theirs)
    if kind == "gradient":
        names.reverse()
    largest = max((_size(ours[name]) for name in names), default=0.0)
    floor = _ZERO * largest if kind == "gradient" else 0.0
    every = same or kind != "output"  # what has no rows is of a rank's own micro-batches
    found = []
    for name in names:
        error, instance = _compare(ours[name], theirs[name], bound, every, floor)
        if error is not None:
            found.append((name, error, instance))
    if found:
        (name, error, instance), others = found[0], [n for n, _, _ in found[1:]]
        yield Difference(step, kind, name, error, None if instance < 0 else instance, others)


def _refuse_other_models(
    a: Record, b: Record, ours: dict[str, Values], theirs: dict[str, Values]
) -> None:
    """ConfigError unless both have the same parameters, of the same shapes."""
    runs = a.head.run, b.head.run
    for name in [*ours, *theirs]:
        shapes = [_shape(side.get(name)) for side in (ours, theirs)]
        if shapes[0] != shapes[1]:
            rule = f"must have the shape of {runs[0]}, {shapes[0]}, in {runs[1]}; None: it has none"
            fix = "compare runs of one model"
            raise invalid(name, "mismatch", shapes[1], rule, fix, kind=ConfigError)


def _shape(values: Values | None) -> tuple[int, ...] | None:
    return None if values is None else next(iter(values.values()))[0].shape


def _size(values: Values) -> float:
    return max((_peak(p) for parts in values.values() for p in parts), default=0.0)


def _peak(part: Part) -> float:
    return float(np.abs(part.samples).max()) if len(part.samples) else 0.0


def _compare(
    ours: Values, theirs: Values, bound: float, every: bool, floor: float
) -> tuple[float | None, int]:
    """(error, instance) of the row that differs most, beyond the bound; error None if none does."""
    scale = max(_size(theirs), floor)
    worst: float | None = None
    where = -1
    for key, parts in ours.items():
        others = theirs.get(key, [])
        if len(parts) != len(others):  # copies, or parts that no other layout has
            parts, others = parts[:1], others[:1]
        for one, two in zip(parts, others):
            if one.shape != two.shape or (key[0] < 0 and not every):
                continue
            if one.digest == two.digest and one.dtype == two.dtype:
                continue
            error = _error(one, two, scale)
            if (error > bound or bound == 0) and (worst is None or error > worst):
                worst, where = error, key[0]
    return worst, where


def _error(one: Part, two: Part, scale: float) -> float:
    """max|a - b| / scale over samples, or the relative difference of the norms if that is more; inf for nan."""
    distance = float(np.abs(one.samples - two.samples).max()) if len(one.samples) else 0.0
    error = distance / scale if scale else float(distance > 0)
    norms = max(one.norm, two.norm, scale * math.prod(one.shape) ** 0.5)
    error = max(error, abs(one.norm - two.norm) / norms if norms else 0.0)
    return error if error == error else float("inf")
