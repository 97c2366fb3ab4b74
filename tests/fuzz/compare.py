"""Compare the run of a job with what another computation of it says, within bounds that are stated here.

Sample indices, token counts and learning rates must be the same numbers. The error of a loss or a norm is relative. That
of a tensor is max|a - b| over its largest value, or over ten times the sum of the learning rates where that is larger:
where a gradient is smaller than AdamW's eps of 1e-4, 1e-8 of rounding in it move a weight by 1e-4 of a rate in each step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tests.fuzz.attempt import Result
from tests.fuzz.job import Job


@dataclass(frozen=True)
class Bounds:
    """Largest errors of losses (of evaluations, too), of gradient norms and of final weights."""

    loss: float = 1e-5
    grad_norm: float = 1e-5
    weights: float = 1e-5


#: fp32: the same sums in another order, as in docs/equivalence.md.
FP32 = Bounds()
#: float64: a difference that is above this is not one of rounding.
FLOAT64 = Bounds(1e-9, 1e-9, 1e-9)
#: Routes are compared up to the first step in which an expert was chosen by less than this.
MARGIN = 1e-4
# bf16 against fp32: the reasons of tests/equivalence/cells.py, for six steps in place of three. A weight whose gradient is
# rounding noise moves by a full step of AdamW, 1e-3, in either direction.
_BF16 = Bounds(loss=5e-3, grad_norm=5e-2, weights=0.1)
# stored in bf16 as well, each weight is rounded by up to 2^-8 of itself in each update
_BF16_WEIGHTS = Bounds(loss=1e-2, grad_norm=0.1, weights=0.15)
#: Wider bounds of values of axes; a job has the widest of its values.
BOUNDS: Mapping[tuple[str, str], Bounds] = {
    ("precision", "bf16"): _BF16,
    ("precision", "bf16, reduced"): _BF16,
    ("precision", "bf16 weights"): _BF16_WEIGHTS,
    # averages are rounded stochastically by up to 2^-8 of themselves, and with them updates
    ("moments", "bf16"): Bounds(loss=1e-3, grad_norm=1e-2, weights=3e-2),
    # the base is rounded to bf16 once on both sides
    ("lora", "bf16 base"): FP32,
    # five iterations in bf16 on both sides, of sums that round to other bf16 numbers
    ("optimizer", "muon, bf16"): Bounds(loss=1e-3, grad_norm=1e-2, weights=3e-2),
    # an entry whose average is rounding noise moves by a full step in either direction
    ("optimizer", "lion"): Bounds(loss=1e-4, grad_norm=1e-3, weights=2.0),
}
#: The part of the entries of a tensor that Lion may move in the other direction.
LION_ENTRIES = 0.01
#: A tensor that moved by less than this part of the sum of the learning rates has a gradient of rounding noise, such as a
#: bias of keys, which adds the same to all scores of a query: nothing else is compared.
NOISE = 1e-3
_EXACT = ("step", "instances", "tokens")


@dataclass(frozen=True)
class Difference:
    """The first quantity that differs, and by how much.

    step     of the row; None for weights, which are those of the end
    error    in units of the bound; infinite where numbers must be the same
    """

    quantity: str
    step: int | None
    got: Any
    wanted: Any
    error: float

    def __str__(self) -> str:
        where = "" if self.step is None else f" of step {self.step}"
        size = "" if math.isinf(self.error) else f", {self.error:.3g} times the bound"
        return f"{self.quantity}{where}: {self.got} instead of {self.wanted}{size}"


@dataclass(frozen=True)
class Comparison:
    """The first difference, or None; the worst error in units of its bound; and how many steps were
    compared, which are fewer than the run has where routes were close."""

    difference: Difference | None
    worst: float
    steps: int


def same_bits(
    got: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]
) -> Difference | None:
    """The first initial tensor that is not the same bits."""
    for name in sorted(got.keys() | wanted.keys()):
        mine, theirs = got.get(name), wanted.get(name)
        if mine is None or theirs is None or not torch.equal(mine, theirs):
            return Difference(f"initial {name}", 0, mine, theirs, math.inf)
    return None


def bounds_of(job: Job) -> Bounds:
    """The bounds of a job: the widest of its values."""
    found = [FP32, *(b for (axis, value), b in BOUNDS.items() if job[axis] == value)]
    return Bounds(*(max(getattr(b, n) for b in found) for n in ("loss", "grad_norm", "weights")))


def compare(job: Job, got: Result, wanted: Result, bounds: Bounds | None = None) -> Comparison:
    """Compare row by row, then the final weights."""
    bounds = bounds or bounds_of(job)
    rows = [row for row in wanted.rows if row["step"]]  # that of the start is no step
    wanted = replace(wanted, rows=rows)
    margin = MARGIN * bounds.loss / FP32.loss if bounds == FLOAT64 else MARGIN
    close = next((i for i, m in enumerate(wanted.margins) if m < margin), len(rows))
    worst, first = 0.0, None
    for found in _errors(job, got, wanted, bounds, close):
        worst = max(worst, found.error)
        if first is None and not found.error <= 1.0:  # NaN differs, too
            first = found
    return Comparison(first, worst, min(close, len(wanted.rows)))


def _errors(
    job: Job, got: Result, wanted: Result, bounds: Bounds, close: int
) -> Iterator[Difference]:
    if len(got.rows) != len(wanted.rows):
        yield Difference("number of steps", None, len(got.rows), len(wanted.rows), math.inf)
    for mine, theirs in list(zip(got.rows, wanted.rows))[:close]:
        yield from _of_row(mine, theirs, bounds)
    if close < len(wanted.rows):
        return
    # frozen weights are no result of the reference, nor is schedule-free's training point one of Forge's
    frozen = {name: got.initial[name] for name in got.initial.keys() - wanted.weights.keys()}
    other = {**frozen, **wanted.weights}
    moved = sum(row["lr"] for row in wanted.rows)
    for name in sorted(got.weights):
        if name not in other:
            yield Difference(f"weights {name}", None, "there", "not there", math.inf)
        else:
            begun = got.initial[name.removeprefix("ema.")]
            yield _of_tensor(job, name, (got.weights[name], other[name], begun), bounds, moved)


def _of_row(
    mine: Mapping[str, Any], theirs: Mapping[str, Any], bounds: Bounds
) -> Iterator[Difference]:
    step = theirs["step"]
    for name in _EXACT:
        equal = mine[name] == theirs[name]
        yield Difference(name, step, mine[name], theirs[name], 0.0 if equal else math.inf)
    # the same formula in doubles, perhaps with its factors in another order
    for name, bound in {"lr": 1e-14, "loss": bounds.loss, "grad_norm": bounds.grad_norm}.items():
        yield _of_number(name, step, mine[name], theirs[name], bound)
    for name in theirs:
        if name == "val_loss" or name.startswith("eval/"):
            yield _of_number(name, step, mine.get(name), theirs[name], bounds.loss)


def _of_number(name: str, step: int, mine: Any, theirs: Any, bound: float) -> Difference:
    if mine is None or theirs is None:  # a step without labels has no loss
        error = 0.0 if mine is theirs else math.inf
    elif mine == theirs:
        error = 0.0
    else:
        error = abs(mine - theirs) / abs(theirs) / bound if theirs else math.inf
    return Difference(name, step, mine, theirs, error)


def _of_tensor(
    job: Job, name: str, tensors: Sequence[torch.Tensor], bounds: Bounds, moved: float
) -> Difference:
    """`tensors`: the two final ones, and the initial one. `moved`: the sum of the learning rates."""
    mine, theirs, begun = (tensor.double() for tensor in tensors)
    if mine.shape != theirs.shape:
        return Difference(f"shape of {name}", None, mine.shape, theirs.shape, math.inf)
    errors = (mine - theirs).abs()
    if not errors.numel():
        return Difference(f"weights {name}", None, (), (), 0.0)
    largest, size = float(errors.max()), max(float(theirs.abs().max()), 10 * moved)
    error = largest / size / bounds.weights
    if job["optimizer"] == "lion":
        # all but a few entries as in fp32, these by as much as steps of both signs move them
        few = torch.quantile(errors.flatten(), 1 - LION_ENTRIES, interpolation="lower")
        error = max(float(few) / size / FP32.weights, largest / moved / bounds.weights)
    elif max(float((x - begun).abs().max()) for x in (mine, theirs)) < NOISE * moved:
        error = min(error, largest / moved / NOISE)
    place = int(errors.argmax())
    values = (float(x.flatten()[place]) for x in (mine, theirs))
    return Difference(f"weights {name}", None, *values, error)
