"""Fits of scaling laws: exact laws are found again, intervals hold the truth, what cannot be fitted is refused."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from forge_core.scaling import ScalingFit, bootstrap, fit_scaling, interval
from forge_testing.problems import assert_problem, rejects

pytestmark = pytest.mark.lane("test")

# Constants of Besiroglu et al. 2024 for the runs of Hoffmann et al. 2022.
TRUTH = ScalingFit(E=1.8172, A=482.01, alpha=0.3478, B=2085.43, beta=0.3658, objective=0.0)
SIZES = (1e7, 3e7, 1e8, 3e8, 1e9)
RATIOS = (5.0, 20.0, 80.0)


def runs(truth: ScalingFit = TRUTH, noise: float = 0.0, seed: int = 0, repeats: int = 1) -> tuple:
    generator = torch.Generator().manual_seed(seed)
    pairs = [(n, n * ratio) for n, ratio in itertools.product(SIZES, RATIOS)] * repeats
    sigma = noise * torch.randn(len(pairs), generator=generator, dtype=torch.float64)
    losses = [truth.loss(n, d) * math.exp(s) for (n, d), s in zip(pairs, sigma.tolist())]
    return [n for n, _ in pairs], [d for _, d in pairs], losses


@pytest.mark.parametrize(
    "truth",
    [TRUTH, ScalingFit(1.69, 406.4, 0.34, 410.7, 0.28, 0.0), ScalingFit(0.5, 20.0, 0.2, 3e4, 0.6, 0.0)],
    ids=["besiroglu", "hoffmann", "steep"],
)  # fmt: skip
def test_an_exact_power_law_is_recovered(truth: ScalingFit) -> None:
    fit = fit_scaling(*runs(truth))
    for name in ("E", "A", "alpha", "B", "beta"):
        assert getattr(fit, name) == pytest.approx(getattr(truth, name), rel=1e-5), name
    assert fit.objective < 1e-20


def test_one_run_that_went_wrong_moves_a_huber_fit_little() -> None:
    """It has 5 % more loss; least squares, delta = 1, moves alpha ten times as far."""
    n, d, losses = runs(repeats=2)
    losses[7] *= 1.05
    robust, squares = fit_scaling(n, d, losses), fit_scaling(n, d, losses, delta=1.0)
    assert abs(robust.alpha - TRUTH.alpha) < 0.1 * abs(squares.alpha - TRUTH.alpha)


def test_the_search_ends_no_higher_than_lbfgs_from_the_truth() -> None:
    """The slow obvious reference: torch's L-BFGS on the objective as the paper writes it."""
    n, d, losses = (torch.tensor(v, dtype=torch.float64) for v in runs(noise=0.01))
    start = [math.log(TRUTH.A), math.log(TRUTH.B), math.log(TRUTH.E), TRUTH.alpha, TRUTH.beta]
    theta = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    lbfgs = torch.optim.LBFGS(
        [theta], max_iter=2000, tolerance_grad=1e-13, tolerance_change=1e-16, history_size=20,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    def objective() -> torch.Tensor:
        a, b, e, alpha, beta = theta
        terms = [a - alpha * n.log(), b - beta * d.log(), e.expand(len(n))]
        fitted = torch.stack(terms).logsumexp(0)
        return torch.nn.functional.huber_loss(fitted, losses.log(), reduction="sum", delta=1e-3)

    def closure() -> torch.Tensor:
        lbfgs.zero_grad()
        value = objective()
        value.backward()
        return value

    for _ in range(5):
        lbfgs.step(closure)
    fit = fit_scaling(n.tolist(), d.tolist(), losses.tolist())
    assert fit.objective <= float(objective().detach()) * (1 + 1e-6)
    assert fit.objective > 1e-6  # of noise there is something left


@pytest.mark.slow
def test_intervals_hold_the_truth_at_their_nominal_rate() -> None:
    """12 noisy studies; 90 % intervals: fewer than 8 of 12 would happen to a right one in 0.4 % of cases."""
    held = {"alpha": 0, "beta": 0}
    widths = []
    for seed in range(12):
        found = bootstrap(*runs(noise=0.003, seed=seed, repeats=2), resamples=60, seed=seed)
        for name in held:
            low, high = interval([getattr(fit, name) for fit in found], 0.9)
            held[name] += low <= getattr(TRUTH, name) <= high
        widths.append(high - low)
    assert all(count >= 8 for count in held.values()), held
    assert max(widths) < 0.5  # they say something


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_the_bootstrap_is_a_function_of_its_seed() -> None:
    one, same, other = (bootstrap(*runs(noise=0.003), resamples=3, seed=s) for s in (1, 1, 2))
    assert one == same
    assert one != other


def test_the_optimum_is_the_lowest_loss_of_a_budget() -> None:
    parameters, tokens = TRUTH.optimum(1e21)
    assert 6 * parameters * tokens == pytest.approx(1e21)
    best = TRUTH.loss(parameters, tokens)
    for factor in (0.5, 0.99, 1.01, 2.0):
        assert TRUTH.loss(parameters * factor, tokens / factor) > best


def test_values_that_cannot_be_fitted_are_rejected() -> None:
    n, d, losses = runs()
    with rejects("parameters", 5, "count"):
        fit_scaling(n[:5], d[:5], losses[:5])
    with rejects("parameters", 2, "levels"):
        fit_scaling(n[:6], d[:6], losses[:6])
    same = [20 * value for value in n]
    with rejects("tokens", ..., "dependent"):
        fit_scaling(n, same, losses)
    with rejects("losses", ..., "range"):
        fit_scaling(n, d, [math.nan, *losses[1:]])
    with rejects("parameters", len(n), "length"):
        fit_scaling(n, d[1:], losses)
    for bad in (0.0, -1.0, math.inf):  # 0 makes all objectives 0, and the first start wins
        with rejects("delta", bad, "range"):
            fit_scaling(n, d, losses, delta=bad)
    for bad in (0.0, math.nan, math.inf):
        with rejects("flops", bad, "range"):
            TRUTH.optimum(bad)
    with rejects("flops_per_parameter", 0.0, "range"):
        TRUTH.optimum(1e18, 0.0)
    with rejects("resamples", 0, "range"):
        bootstrap(n, d, losses, resamples=0)
    with rejects("values", ..., "missing"):
        interval([])
    with rejects("level", 1.0, "range"):
        interval([1.0], 1.0)


def test_losses_that_do_not_fall_have_no_power_law() -> None:
    """Before, an alpha of 5e-13 gave a best model of 3e16 parameters."""
    n, d, _ = runs()
    with rejects("parameters", ..., "flat") as error:
        fit_scaling(n, d, [2.0] * len(n))
    assert_problem(error.value, "tokens", ..., "flat")
    with rejects("parameters", ..., "flat"):
        fit_scaling(n, d, [1 + size / 1e9 + 1e3 / tokens**0.4 for size, tokens in zip(n, d)])
    with rejects("tokens", ..., "flat"):
        fit_scaling(n, d, [1 + tokens / 1e11 + 1e3 / size**0.4 for size, tokens in zip(n, d)])


def test_values_over_nine_orders_of_magnitude() -> None:
    pairs = [(n, n * ratio) for n, ratio in itertools.product((1e3, 1e6, 1e9, 1e12), RATIOS)]
    fit = fit_scaling(*zip(*pairs), [TRUTH.loss(*pair) for pair in pairs])
    assert fit.alpha == pytest.approx(TRUTH.alpha, rel=1e-5)
