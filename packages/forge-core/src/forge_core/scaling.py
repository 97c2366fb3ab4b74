"""Scaling laws: loss as a function of parameters and tokens, fitted to runs, with its uncertainty.

    fit = fit_scaling(parameters, tokens, losses)            # L(N, D) = E + A / N^alpha + B / D^beta
    parameters, tokens = fit.optimum(1e18)                   # of 6 N D floating-point operations
    resampled = bootstrap(parameters, tokens, losses)
    low, high = interval([other.alpha for other in resampled])

The estimator is approach 3 of Hoffmann et al. 2022: the Huber loss of log L, least over a grid of starts. Besiroglu et al. 2024
found that their search had stopped early and that their intervals were too narrow. Here the objective is a sum, not a mean, in
float64, and each search goes on until its steps are rounding noise. It is a damped Gauss-Newton search with the weights of
Huber's loss: it runs all starts and all resamples as one batch of 5 x 5 systems, which L-BFGS cannot.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forge_core._shared.problems import Problem, invalid, raise_problems

__all__ = ["NUM_CONSTANTS", "ScalingFit", "bootstrap", "fit_scaling", "interval"]

#: E, A, alpha, B, beta.
NUM_CONSTANTS = 5
_LEAST_TERM = 1e-6  # of a loss: the exponent of a term that changes less over all runs is unknown
_POSITIVE = "must be finite and above 0"
_LEVELS = 3  # distinct N, and distinct D: E, A and alpha are not known from fewer
_BEST_STARTS = 24
_ITERATIONS = 400


@dataclass(frozen=True)
class ScalingFit:
    """L(N, D) = E + A / N^alpha + B / D^beta in the unit of the losses; `objective` is the sum of Huber losses."""

    E: float
    A: float
    alpha: float
    B: float
    beta: float
    objective: float

    def loss(self, parameters: float, tokens: float) -> float:
        """Return the loss of a model of N parameters after D tokens."""
        return self.E + self.A / parameters**self.alpha + self.B / tokens**self.beta

    def optimum(self, flops: float, flops_per_parameter: float = 6.0) -> tuple[float, float]:
        """Return the (N, D) of the lowest loss with `flops = flops_per_parameter * N * D`."""
        for name, value, fix in (
            ("flops", flops, "use 1e18"),
            ("flops_per_parameter", flops_per_parameter, "use 6.0"),
        ):
            if not 0 < value < math.inf:
                raise invalid(name, "range", value, _POSITIVE, fix)

        product, total = flops / flops_per_parameter, self.alpha + self.beta
        # d/dN of A N^-alpha + B (product / N)^-beta is zero there
        scale = (self.alpha * self.A / (self.beta * self.B)) ** (1.0 / total)
        parameters = scale * product ** (self.beta / total)
        return parameters, product / parameters


def fit_scaling(
    parameters: Sequence[float],
    tokens: Sequence[float],
    losses: Sequence[float],
    *,
    delta: float = 1e-3,
) -> ScalingFit:
    """Fit the constants to runs of N parameters, D tokens and a final loss each; `delta` is Huber's, of log L.

    Raises ValueError for fewer runs than constants + 1, fewer than three distinct N or D, an N and a D that are powers of each
    other (for example the same tokens per parameter in all runs), values that are not above 0, and losses that do not fall with
    N or with D.
    Cost: below a second; 972 starts are compared and the best 24 followed.
    """
    points = _points(parameters, tokens, losses, delta)
    once = torch.ones(1, points.shape[1])
    theta, objective = _search(points, once, _starts(points, delta), delta)
    fit = _to_fits(theta, objective)[0]
    raise_problems("", _flat_terms(fit, points))
    return fit


def bootstrap(
    parameters: Sequence[float],
    tokens: Sequence[float],
    losses: Sequence[float],
    *,
    resamples: int = 200,
    seed: int = 0,
    delta: float = 1e-3,
) -> list[ScalingFit]:
    """Fit runs that are drawn from these with replacement; the same for the same `seed`.

    A draw that cannot be fitted (see `fit_scaling`) is drawn again. Each search begins from the fit of all runs and
    from their best starts. Cost: some seconds for 200.
    """
    if resamples < 1:
        raise invalid("resamples", "range", resamples, "must be at least 1", "use 200")
    points = _points(parameters, tokens, losses, delta)

    generator = torch.Generator().manual_seed(seed)
    number, counts = points.shape[1], list[Tensor]()
    while len(counts) < resamples:
        drawn = torch.randint(number, (number,), generator=generator)
        count = torch.bincount(drawn, minlength=number).double()
        if not _data_problems(points[:, count > 0]):
            counts.append(count)

    starts = _starts(points, delta)
    best, _ = _search(points, torch.ones(1, number), starts, delta)
    starts = torch.cat([best, starts[:8]])
    return _to_fits(*_search(points, torch.stack(counts), starts, delta))


def interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Return the central interval that holds a fraction `level` of the values, as of a bootstrap."""
    if not values:
        raise invalid("values", "missing", ..., "must be one or more")
    if not 0 < level < 1:
        raise invalid("level", "range", level, "must be between 0 and 1", "use 0.95")
    edges = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    low, high = torch.quantile(torch.tensor(values, dtype=torch.float64), edges).tolist()
    return low, high


# ---- the search. theta is (log A, log B, log E, log alpha, log beta): all constants are positive.


def _points(
    parameters: Sequence[float], tokens: Sequence[float], losses: Sequence[float], delta: float
) -> Tensor:
    """log N, log D, log L: (3, R). ValueError for what cannot be fitted."""
    if not 0 < delta < math.inf:
        raise invalid("delta", "range", delta, _POSITIVE, "use 1e-3")
    if not len(parameters) == len(tokens) == len(losses):
        rule = f"and tokens and losses must have one length, not {len(tokens)} and {len(losses)}"
        raise invalid("parameters", "length", len(parameters), rule)
    rows = torch.tensor([list(parameters), list(tokens), list(losses)], dtype=torch.float64)
    for name, row in zip(("parameters", "tokens", "losses"), rows):
        if not bool(((row > 0) & row.isfinite()).all()):
            raise invalid(name, "range", ..., _POSITIVE, "leave out runs that diverged")
    points = rows.log()
    raise_problems("", _data_problems(points))
    return points


def _data_problems(points: Tensor) -> list[Problem]:
    """Problems of runs that determine no exponents."""
    number = points.shape[1]
    if number <= NUM_CONSTANTS:
        rule = f"is the number of runs, too few for {NUM_CONSTANTS} constants and their uncertainty"
        return [Problem("parameters", "count", number, rule, f"train {NUM_CONSTANTS + 1} or more")]

    rule = "is the number of distinct values, too few for its exponent"
    fix = f"train {_LEVELS} or more"
    problems = [
        Problem(name, "levels", levels, rule, fix)
        for name, row in (("parameters", points[0]), ("tokens", points[1]))
        if (levels := len(row.unique())) < _LEVELS
    ]
    # N and D on one line in logarithms: any exponent of one can be moved to the other
    if not problems and abs(float(torch.corrcoef(points[:2])[0, 1])) > 1 - 1e-9:
        rule = "of each run follow from its parameters, so that their terms cannot be separated"
        fix = "train each size on several budgets"
        problems.append(Problem("tokens", "dependent", ..., rule, fix))
    return problems


def _flat_terms(fit: ScalingFit, points: Tensor) -> Iterator[Problem]:
    """A problem for each term of N or D that is the same in all runs."""
    log_n, log_d, log_l = points
    for name, scale, exponent, row in (
        ("parameters", fit.A, fit.alpha, log_n),
        ("tokens", fit.B, fit.beta, log_d),
    ):
        term = (math.log(scale) - exponent * row - log_l.mean()).exp()
        if float(term.max() - term.min()) < _LEAST_TERM:
            rule = "must lower the losses, and do not, so that they have no exponent"
            fix = "look for runs that diverged or whose learning rate does not suit their size"
            yield Problem(name, "flat", ..., rule, fix)


def _starts(points: Tensor, delta: float) -> Tensor:
    """Return the best of a grid of starts for all runs: (S, 5)."""
    log_n, log_d, log_l = points
    middle, least = float(log_l.mean()), float(log_l.min())
    exponents = (0.1, 0.2, 0.35, 0.5, 0.8, 1.2)
    terms = (-4.0, -3.0, -2.0, -1.0, 0.0)  # log of a term over the loss, in the middle of the runs

    grid = [
        (
            middle + of_n + alpha * float(log_n.mean()),
            middle + of_d + beta * float(log_d.mean()),
            least + of_e,
            math.log(alpha),
            math.log(beta),
        )
        for alpha, beta, of_n, of_d, of_e in itertools.product(
            exponents, exponents, terms[::2], terms[::2], (-1.5, -0.5, -0.1)
        )
    ]

    starts = torch.tensor(grid, dtype=torch.float64)
    residual, _ = _residuals(points, starts[None])
    order = _huber(residual, delta).sum(-1)[0].argsort(stable=True)
    return starts[order[:_BEST_STARTS]]


def _residuals(points: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
    """log of the fit minus log L of each run (W, S, R), and its gradient (W, S, R, 5); theta is (W, S, 5)."""
    log_n, log_d, log_l = points
    a, b, e, alpha, beta = (column[..., None] for column in theta.unbind(-1))
    alpha, beta = alpha.exp(), beta.exp()
    terms = torch.stack(
        [a - alpha * log_n, b - beta * log_d, e.expand(*e.shape[:-1], log_n.numel())]
    )
    fitted = terms.logsumexp(0)
    of_a, of_b, of_e = (terms - fitted).exp()
    grads = torch.stack([of_a, of_b, of_e, -of_a * alpha * log_n, -of_b * beta * log_d], -1)
    return fitted - log_l, grads


def _huber(residual: Tensor, delta: float) -> Tensor:
    size = residual.abs()
    return torch.where(size <= delta, 0.5 * residual**2, delta * (size - 0.5 * delta))


def _search(points: Tensor, weights: Tensor, starts: Tensor, delta: float) -> tuple[Tensor, Tensor]:
    """Return the best theta (W, 5) and objective (W,) over all starts (S, 5), of runs weighted by the rows of (W, R)."""
    weights = weights.double()[:, None, :]  # (W, 1, R)
    theta = starts.expand(len(weights), *starts.shape).clone()  # (W, S, 5)
    damping = torch.full(theta.shape[:2], 1e-2, dtype=torch.float64)
    residual, grads = _residuals(points, theta)
    value = (weights * _huber(residual, delta)).sum(-1)  # (W, S)
    identity = torch.eye(NUM_CONSTANTS, dtype=torch.float64)

    for _ in range(_ITERATIONS):
        # Huber's loss is a square whose weight falls with the residual
        weight = weights * (delta / residual.abs().clamp(min=delta))
        curvature = torch.einsum("wsr,wsri,wsrj->wsij", weight, grads, grads)
        gradient = torch.einsum("wsr,wsr,wsri->wsi", weight, residual, grads)

        # the floor keeps the system regular where a constant has no effect
        size = curvature.diagonal(dim1=-2, dim2=-1)
        floor = 1e-12 * size.amax(-1, keepdim=True) + 1e-300
        damped = curvature + (damping[..., None] * (size + floor))[..., None] * identity
        step = torch.linalg.solve(damped, gradient[..., None])[..., 0].clamp(-2.0, 2.0)

        # a step is taken only where it lowers the objective (Levenberg-Marquardt)
        moved = theta - step
        new_residual, new_grads = _residuals(points, moved)
        new_value = (weights * _huber(new_residual, delta)).sum(-1)
        better = new_value < value
        theta = torch.where(better[..., None], moved, theta)
        residual = torch.where(better[..., None], new_residual, residual)
        grads = torch.where(better[..., None, None], new_grads, grads)
        value = torch.where(better, new_value, value)
        damping = torch.where(better, damping / 3, damping * 4).clamp(1e-12, 1e12)
        settled = step.abs().amax(-1) < 1e-12
        if bool((settled | (damping >= 1e12)).all()):
            break

    best = value.argmin(-1)
    rows = torch.arange(len(best))
    return theta[rows, best], value[rows, best]


def _to_fits(theta: Tensor, objective: Tensor) -> list[ScalingFit]:
    """One fit for each row of theta (W, 5), which is in logarithms."""
    rows = zip(theta.exp().tolist(), objective.tolist())
    return [ScalingFit(e, a, alpha, b, beta, value) for (a, b, e, alpha, beta), value in rows]
