"""Measure a cell: its ranks against the reference."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from candidate import candidate
from cells import FEATURES, LAYOUTS, ONE_RANK_BF16, ROUTES, Cell
from reference import reference
from torch import Tensor
from training import Piece, Run

from forge_testing import run_on_ranks

SECONDS = 300.0  # a cell of eight ranks on a busy host


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
    """Run a cell, with a mistake of `mutations.MUTATIONS` if asked, and what it is compared with."""
    wanted = _truth(cell)
    cell = replace(cell, seed=wanted.seed)
    began = time.perf_counter()
    found = run_on_ranks(LAYOUTS[cell.layout].world, candidate, cell, mutation, timeout=SECONDS)
    seconds = time.perf_counter() - began
    worst = errors(found, wanted)
    if ONE_RANK_BF16 in cell.bounds:
        (alone,) = run_on_ranks(1, candidate, cell, timeout=SECONDS)
        worst[ONE_RANK_BF16] = _worst(errors(found, alone).values())
    return Measured(cell, worst, seconds)


def _truth(cell: Cell) -> Run:
    """Cells whose data and model are the same have one reference."""
    layout = LAYOUTS[cell.layout]
    key = (
        cell.feature,
        cell.optimizer,
        cell.seed,
        layout.readers,
        cell.micro_batches,
        layout.layers,
        cell.tf32,
    )
    while key not in _truths:
        (run,) = run_on_ranks(1, reference, cell, timeout=SECONDS)
        cell = replace(cell, seed=run.seed)
        rounded = FEATURES[cell.feature].bf16 or (cell.tf32 and bool(run.routes[0]))
        if not rounded or _same_on_one_rank(cell, run):
            _truths[key] = run
        cell = replace(cell, seed=run.seed + 1)
    return _truths[key]


def _same_on_one_rank(cell: Cell, wanted: Run) -> bool:
    """Whether no choice of an expert is so close that bf16 or TF32 makes another."""
    (alone,) = run_on_ranks(1, candidate, cell, timeout=SECONDS)
    return all(_same_routes([alone.routes[i]], wanted.routes[i]) for i in range(len(wanted.routes)))


_truths: dict[tuple[Any, ...], Run] = {}


def errors(ranks: list[Run], wanted: Run) -> dict[str, float]:
    """Worst error of each quantity. Losses and norms of all ranks must have the same bits: each rank
    would clip by a number of its own. So must the copies of what several ranks hold."""
    run = ranks[0]
    same = all(_same_numbers(run, other) for other in ranks)
    steps = range(len(wanted.gradients))
    gradients = [
        _of_tensors([r.gradients[i] for r in ranks], wanted.gradients[i], _is_scalar) for i in steps
    ]
    found = {
        "loss": _worst(map(error, run.losses, wanted.losses)),
        "gradients": _worst([*gradients, *_of_scalars(ranks, wanted)]),
        "norm": _worst(map(error, run.norms, wanted.norms)) if same else math.inf,
        "weights": _of_tensors([r.weights for r in ranks], wanted.weights),
    }
    if wanted.routes[0]:
        equal = all(_same_routes([r.routes[i] for r in ranks], wanted.routes[i]) for i in steps)
        found[ROUTES] = 0.0 if equal else math.inf
    return found


def whole(pieces: Iterable[Piece]) -> Tensor:
    """The tensor of all ranks' pieces: nan where there is none, or where two ranks differ."""
    pieces = list(pieces)
    if not pieces:
        return torch.full((), math.nan)
    joined = torch.full(pieces[0].shape, math.nan)
    covered = torch.zeros(pieces[0].shape, dtype=torch.bool)
    for values, offset, _ in pieces:
        place = tuple(slice(o, o + n) for o, n in zip(offset, values.shape, strict=True))
        differs = covered[place] & (joined[place] != values)
        joined[place] = values.float().masked_fill(differs, math.nan)
        covered[place] = True
    return joined


def error(got: Tensor, wanted: Tensor) -> float:
    """max|a - b| / max|b|; where b is zero, 0 if a is zero and inf if not."""
    difference, scale = float((got - wanted).abs().max()), float(wanted.abs().max())
    if scale == 0:
        return 0.0 if difference == 0 else math.inf
    return difference / scale


def _of_tensors(
    ranks: list[dict[str, Piece]],
    wanted: Mapping[str, Piece],
    leave_out: Callable[[Piece], bool] = lambda piece: False,
) -> float:
    """Of every tensor but those to leave out; a rank of a pipeline has some of them."""
    assert all(rank.keys() <= wanted.keys() for rank in ranks)
    return _worst(
        error(whole(rank[name] for rank in ranks if name in rank), whole([piece]))
        for name, piece in wanted.items()
        if not leave_out(piece)
    )


def _is_scalar(piece: Piece) -> bool:
    return math.prod(piece.shape) == 1


def _of_scalars(ranks: list[Run], wanted: Run) -> Iterator[float]:
    """Of gradients of one element, as a gate has, over all steps: in one step its terms may cancel to nothing."""
    for name in (n for n, piece in wanted.gradients[0].items() if _is_scalar(piece)):
        steps = [
            (
                whole(r.gradients[i][name] for r in ranks if name in r.gradients[i]),
                whole([own[name]]),
            )
            for i, own in enumerate(wanted.gradients)
        ]
        yield error(*(torch.stack(side).flatten() for side in zip(*steps, strict=True)))


def _same_routes(ranks: list[dict[str, Tensor]], wanted: dict[str, Tensor]) -> bool:
    """Whether the choices of all ranks together are those of one process: each routes other tokens."""
    totals = {n: sum(rank[n] for rank in ranks if n in rank) for n in wanted}
    return all(torch.equal(torch.as_tensor(totals[name]), wanted[name]) for name in wanted)


def _worst(values: Iterable[float]) -> float:
    """The largest; nan if one is nan, as `max` would not say."""
    return float(torch.tensor(list(values), dtype=torch.float64).max())


def _same_numbers(run: Run, other: Run) -> bool:
    pairs = zip([*run.losses, *run.norms], [*other.losses, *other.norms], strict=True)
    return all(torch.equal(a, b) for a, b in pairs)
