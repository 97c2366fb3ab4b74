"""The first difference of two records, in the order in which a step computes."""

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
_ZERO = 1e-5  # a gradient below this fraction of the largest one is rounding

Values = dict[tuple[int, int], list[Part]]


@dataclass(frozen=True)
class Difference:
    """The first difference of two replays.

    `quantity`: "weight" (before the step), "instances" (sample indices), "data" (fields of the batch), "output", "loss",
    "gradient", "grad_norm" or "lr". `name` is a parameter, a field of the batch, or a module, "" for a number of the
    row; `others` are further names of the same quantity that differ in this step. `error` is max|a - b| / max|b|, of
    samples; `instance` is the sample index of the sequence that differs most.
    """

    step: int
    quantity: str
    name: str = ""
    error: float | None = None
    instance: int | None = None
    others: list[str] = field(default_factory=list)
    values: tuple[Any, Any] | None = None


def bound_of(a: Record, b: Record, tolerance: float | None) -> float:
    """The relative bound of a comparison: `tolerance` if given, 0 (bit-equal) for records of one layout, else BOUND."""
    if tolerance is not None:
        return tolerance
    return 0.0 if _same_layout(a, b) else BOUND


def _same_layout(a: Record, b: Record) -> bool:
    """Whether both have the same number of ranks, the same [parallel] and the same kind of device."""
    return all(getattr(a.head, k) == getattr(b.head, k) for k in ("world_size", "layout", "device"))


def first_difference(a: Record, b: Record, tolerance: float | None = None) -> Difference | None:
    """Find the first difference of the steps that are in both; None without one above the bound (see `bound_of`).

    In each step: weights before it, sample indices and data, outputs in the order of the forward, the loss, gradients in
    the order of the backward, their norm, the learning rate; after the last step weights again. ConfigError where no
    step is in both.
    """
    first, last = max(a.head.first, b.head.first), min(a.head.last, b.head.last)
    if first > last:
        rule = f"has steps {b.head.first} to {b.head.last}, and {a.folder} {a.head.first} to {a.head.last}"
        fix = "record steps that are in both"
        raise invalid("run_b", "common", str(b.folder), rule, fix, kind=ConfigError)
    bound = bound_of(a, b, tolerance)
    for step in range(first, last + 2):
        found = next(_of_step(a, b, step, bound, only_weights=step > last), None)
        if found is not None:
            return found
    return None


def _of_step(
    a: Record, b: Record, step: int, bound: float, only_weights: bool
) -> Iterator[Difference]:
    yield from _tensors(a, b, step, "weight", bound)
    if only_weights:
        return
    rows = a.row(step), b.row(step)
    yield from _number(step, "instances", rows, 0.0)
    yield from _tensors(a, b, step, "data", 0.0)
    yield from _tensors(a, b, step, "output", bound)
    yield from _number(step, "loss", rows, bound)
    yield from _tensors(a, b, step, "gradient", bound)
    yield from _number(step, "grad_norm", rows, bound)
    yield from _number(step, "lr", rows, bound)


def _number(
    step: int, name: str, rows: tuple[Mapping[str, Any], Mapping[str, Any]], bound: float
) -> Iterator[Difference]:
    one, two = (row.get(name) for row in rows)
    if not close(one, two, bound):
        yield Difference(step, name, values=(one, two))


def close(one: Any, two: Any, bound: float) -> bool:
    """Whether numbers are within a relative bound; with 0, and for other values than floats, whether they are equal."""
    if bound and isinstance(one, float) and isinstance(two, float):
        return abs(one - two) <= bound * max(abs(one), abs(two))
    return bool(one == two)


def _tensors(a: Record, b: Record, step: int, kind: str, bound: float) -> Iterator[Difference]:
    """The first name that differs: of outputs in the order of the forward, of gradients in reverse."""
    ours, theirs = a.entries(step, kind), b.entries(step, kind)
    names = [name for name in ours if name in theirs]
    if kind == "weight":
        _require_same_model(a, b, ours, theirs)
    if kind == "gradient":
        names.reverse()

    largest = max((_size(ours[name]) for name in names), default=0.0)
    floor = _ZERO * largest if kind == "gradient" else 0.0
    # an output without sequences is of a rank's own micro-batch, which other layouts do not have
    every = kind != "output" or _same_layout(a, b)
    found = []
    for name in names:
        error, instance = _compare(ours[name], theirs[name], bound, every, floor)
        if error is not None:
            found.append((name, error, instance))
    if found:
        (name, error, instance), others = found[0], [n for n, _, _ in found[1:]]
        yield Difference(step, kind, name, error, None if instance < 0 else instance, others)


def _require_same_model(
    a: Record, b: Record, ours: dict[str, Values], theirs: dict[str, Values]
) -> None:
    """Raise ConfigError unless both have the same parameters, of the same shapes."""

    def shape(values: Values | None) -> tuple[int, ...] | None:
        return None if values is None else next(iter(values.values()))[0].shape

    for name in [*ours, *theirs]:
        one, two = shape(ours.get(name)), shape(theirs.get(name))
        if one != two:
            rule = (
                f"must have the shape of {a.head.run}, {one}, in {b.head.run}; None: it is missing"
            )
            fix = "compare runs of one model"
            raise invalid(name, "mismatch", two, rule, fix, kind=ConfigError)


def _size(values: Values) -> float:
    """The largest magnitude among the samples."""
    samples = [p.samples for parts in values.values() for p in parts if len(p.samples)]
    return max((float(np.abs(each).max()) for each in samples), default=0.0)


def _compare(
    ours: Values, theirs: Values, bound: float, every: bool, floor: float
) -> tuple[float | None, int]:
    """(error, instance) of the entry that differs most, above the bound; (None, -1) if all are within it."""
    scale = max(_size(theirs), floor)
    worst: float | None = None
    where = -1
    for key, parts in ours.items():
        others = theirs.get(key, [])
        if len(parts) != len(others):  # replicas, or shards that no other layout has
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
    """max|a - b| / scale over samples, or the relative difference of the norms if that is larger; inf for nan."""
    distance = float(np.abs(one.samples - two.samples).max()) if len(one.samples) else 0.0
    error = distance / scale if scale else float(distance > 0)
    norms = max(one.norm, two.norm, scale * math.prod(one.shape) ** 0.5)
    error = max(error, abs(one.norm - two.norm) / norms if norms else 0.0)
    return error if error == error else float("inf")
