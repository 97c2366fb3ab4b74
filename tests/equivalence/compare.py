"""Measure a cell: its ranks against the reference."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from candidate import candidate
from cells import LAYOUTS, ONE_RANK_BF16, Cell
from reference import reference
from torch import Tensor
from training import Run

from forge_testing import run_on_ranks


@dataclass(frozen=True)
class Measured:
    """Worst error of each quantity over all steps, tensors and ranks; `seconds` on the cell's ranks."""

    cell: Cell
    errors: dict[str, float]
    seconds: float

    @property
    def red(self) -> list[str]:
        """The quantities out of bounds, nan included."""
        return [name for name, error in self.errors.items() if not error <= self.cell.bounds[name]]


def measure(cell: Cell, mutation: str | None = None) -> Measured:
    """Run a cell, with a mistake of `candidate.MUTATIONS` if asked, and what it is compared with."""
    (wanted,) = run_on_ranks(1, reference, cell)
    began = time.perf_counter()
    found = run_on_ranks(LAYOUTS[cell.layout].world, candidate, cell, mutation)
    seconds = time.perf_counter() - began
    worst = _over_ranks(found, wanted)
    if ONE_RANK_BF16 in cell.bounds:
        (alone,) = run_on_ranks(1, candidate, cell)
        worst[ONE_RANK_BF16] = _worst(_over_ranks(found, alone).values())
    if not all(_same_bits(run, found[0]) for run in found):
        worst["norm"] = math.inf  # each rank would clip by a number of its own
    return Measured(cell, worst, seconds)


def _over_ranks(found: list[Run], wanted: Run) -> dict[str, float]:
    per_rank = [errors(run, wanted) for run in found]
    return {name: _worst(e[name] for e in per_rank) for name in per_rank[0]}


def errors(run: Run, wanted: Run) -> dict[str, float]:
    """Worst error of each quantity."""
    return {
        "loss": _worst(map(error, run.losses, wanted.losses)),
        "gradients": _worst(map(_of_tensors, run.gradients, wanted.gradients)),
        "norm": _worst(map(error, run.norms, wanted.norms)),
        "weights": _of_tensors(run.weights, wanted.weights),
    }


def error(got: Tensor, wanted: Tensor) -> float:
    """max|a - b| / max|b|; where b is zero, 0 if a is zero and inf if not."""
    difference, scale = float((got - wanted).abs().max()), float(wanted.abs().max())
    if scale == 0:
        return 0.0 if difference == 0 else math.inf
    return difference / scale


def _of_tensors(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    assert got.keys() == wanted.keys()
    return _worst(error(got[name], wanted[name]) for name in wanted)


def _worst(values: Iterable[float]) -> float:
    """The largest; nan if one is nan, as `max` would not say."""
    return float(torch.tensor(list(values), dtype=torch.float64).max())


def _same_bits(run: Run, other: Run) -> bool:
    pairs = zip([*run.losses, *run.norms], [*other.losses, *other.norms], strict=True)
    return all(torch.equal(a, b) for a, b in pairs)
