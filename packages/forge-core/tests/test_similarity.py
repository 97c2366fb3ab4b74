"""CKA and SVCCA against their definitions written out, and what they must not see."""

import math

import pytest
import torch

from forge_core.interp import MinibatchCKA, debiased_linear_cka, linear_cka, svcca
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

RANDOM = torch.Generator().manual_seed(0)
X = torch.randn(60, 7, generator=RANDOM)
Y = X @ torch.randn(7, 5, generator=RANDOM) + torch.randn(60, 5, generator=RANDOM)
Q = torch.linalg.qr(torch.randn(7, 7, generator=RANDOM)).Q


def test_linear_cka_is_the_hsic_of_centered_gram_matrices():
    n = len(X)
    centre = torch.eye(n).double() - 1 / n
    k, g = ((centre @ (z.double() @ z.double().T) @ centre) for z in (X, Y))
    wanted = (k * g).sum() / ((k * k).sum() * (g * g).sum()).sqrt()
    assert linear_cka(X, Y) == pytest.approx(float(wanted), abs=1e-10)
    assert 0.2 < linear_cka(X, Y) < 0.95


def test_debiased_cka_is_the_sum_over_different_samples():
    x, y = X[:9].double(), Y[:9].double()
    n = len(x)

    def hsic(k, g):
        """The mean over four different samples of k_ij (g_ij + g_qr - 2 g_iq): Song et al. 2012, definition."""
        total, count = 0.0, 0
        for i in range(n):
            for j in range(n):
                for q in range(n):
                    for r in range(n):
                        if len({i, j, q, r}) == 4:
                            total += k[i][j] * (g[i][j] + g[q][r] - 2 * g[i][q])
                            count += 1
        return total / count

    k, g = (x @ x.T).tolist(), (y @ y.T).tolist()
    wanted = hsic(k, g) / (hsic(k, k) * hsic(g, g)) ** 0.5
    assert debiased_linear_cka(x, y) == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize("measure", [linear_cka, debiased_linear_cka, svcca])
def test_rotation_shift_and_scale_do_not_count(measure):
    assert measure(X, X) == pytest.approx(1.0, abs=1e-9)
    assert measure(X, 3 * X @ Q + 5) == pytest.approx(1.0, abs=1e-6)
    assert measure(X @ Q + 1, Y) == pytest.approx(measure(X, Y), abs=1e-6)
    assert measure(Y, X) == pytest.approx(measure(X, Y), abs=1e-9)


def test_random_features_are_alike_only_to_the_biased_estimator():
    x, y = torch.randn(50, 200, generator=RANDOM), torch.randn(50, 200, generator=RANDOM)
    assert linear_cka(x, y) > 0.7
    assert abs(debiased_linear_cka(x, y)) < 0.1


def test_svcca_is_the_mean_of_canonical_correlations():
    x, y = (z.double() - z.double().mean(0) for z in (X, Y))
    inverse = [torch.linalg.inv(torch.linalg.cholesky(z.T @ z)) for z in (x, y)]
    wanted = torch.linalg.svdvals(inverse[0] @ (x.T @ y) @ inverse[1].T)
    assert svcca(X, Y, share=1.0) == pytest.approx(float(wanted.mean()), abs=1e-9)
    noisy = torch.cat((X, 1e-4 * torch.randn(60, 3, generator=RANDOM)), dim=1)
    assert svcca(noisy, X) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.slow
def test_batches_are_averaged_to_the_full_value():
    one = MinibatchCKA()
    one.update(X, Y)
    assert one.value() == pytest.approx(debiased_linear_cka(X, Y), abs=1e-12)
    x = torch.randn(6000, 7, generator=RANDOM)
    y = x @ torch.randn(7, 5, generator=RANDOM) + torch.randn(6000, 5, generator=RANDOM)
    many = MinibatchCKA()
    for batch in zip(x.split(60), y.split(60), strict=True):
        many.update(*batch)
    assert many.value() == pytest.approx(debiased_linear_cka(x, y), abs=0.02)
    unrelated = MinibatchCKA()
    for batch in zip(x.split(60), y.flip(0).split(60), strict=True):
        unrelated.update(*batch)
    assert abs(unrelated.value()) < 0.01
    with rejects("MinibatchCKA", ..., "empty"):
        MinibatchCKA().value()


def test_inputs_without_a_similarity_are_rejected():
    with rejects("MinibatchCKA", ..., "empty"):
        MinibatchCKA().value()
    with rejects("x", 10, "directions"):
        svcca(X[:10], Y[:10], share=1.0)
    with rejects("share", 0.0, "range"):
        svcca(X, Y, share=0.0)
    with rejects("x", 60, "length"):
        linear_cka(X, Y[1:])
    with rejects("x", (60, 7, 1), "shape"):
        linear_cka(X[..., None], Y)
    with rejects("x", 3, "range"):
        debiased_linear_cka(X[:3], Y[:3])


@pytest.mark.parametrize("measure", [linear_cka, debiased_linear_cka, svcca])
@pytest.mark.parametrize("value", [0.0, 0.1, 1e6 / 3])
def test_what_is_constant_is_like_nothing(measure, value):
    constant = torch.full((60, 4), value)
    assert math.isnan(measure(X, constant))
    assert math.isnan(measure(constant, constant))
    batches = MinibatchCKA()
    batches.update(X, constant)
    assert math.isnan(batches.value())


@pytest.mark.parametrize("measure", [linear_cka, debiased_linear_cka, svcca])
def test_a_far_mean_does_not_count(measure):
    far = X.double() * 1e-3 + 1e4
    assert measure(X, far) == pytest.approx(1.0, abs=1e-9)
