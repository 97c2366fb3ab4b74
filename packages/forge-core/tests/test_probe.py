"""Readers of a stream: the model's own head, exact ridge regression, converged logistic regression."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from forge_core import Transformer, TransformerConfig
from forge_core.interp import ActivationStore, fit_classifier, fit_ridge, logit_lens
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

RANDOM = torch.Generator().manual_seed(0)
X = 3 + 2 * torch.randn(80, 6, generator=RANDOM)
LABELS = (X @ torch.randn(6, 3, generator=RANDOM)).argmax(-1)


@pytest.mark.parametrize("tied", [False, True])
def test_the_lens_on_the_last_stream_is_the_model(tied):
    config = TransformerConfig(32, dim=16, num_layers=2, num_heads=2, tie_embeddings=tied)
    model = Transformer(config)
    tokens = torch.arange(10).view(2, 5)
    with ActivationStore("*.resid_post").watch(model) as store:
        logits = model(tokens)
    assert torch.equal(logit_lens(model, store["layers.1.resid_post"]), logits)
    assert not torch.allclose(logit_lens(model, store["layers.0.resid_post"]), logits)
    with rejects("model", ..., "missing", where="Linear"):
        logit_lens(nn.Linear(2, 2), torch.zeros(1, 1, 2))


@pytest.mark.parametrize("l2", [0.0, 2.5])
def test_ridge_is_least_squares_of_an_extended_matrix(l2):
    y = torch.randn(80, 2, generator=RANDOM)
    probe = fit_ridge(X, y, l2)
    ones = torch.cat((X.double(), torch.ones(80, 1).double()), dim=1)
    penalty = torch.diag(torch.tensor([l2**0.5] * 6 + [0.0])).double()
    wanted = torch.linalg.lstsq(
        torch.cat((ones, penalty)), torch.cat((y.double(), torch.zeros(7, 2).double()))
    ).solution
    torch.testing.assert_close(probe.weight, wanted[:6])
    torch.testing.assert_close(probe.bias, wanted[6])
    torch.testing.assert_close(probe(X), ones @ wanted)


def test_the_classifier_is_at_the_minimum_of_its_loss():
    probe = fit_classifier(X, LABELS, l2=0.5)
    spread = X.double().std(0, correction=0)

    def loss(weight, bias):
        errors = F.cross_entropy(X.double() @ weight + bias, LABELS, reduction="sum")
        return errors + 0.25 * (weight * spread[:, None]).square().sum()

    weight, bias = (value.clone().requires_grad_() for value in probe)
    best = loss(weight, bias)
    slopes = torch.autograd.grad(best, (weight, bias))
    assert max(float(slope.abs().max()) for slope in slopes) < 1e-3
    moved = [loss(weight + 1e-2 * torch.randn(6, 3, generator=RANDOM), bias) for _ in range(5)]
    assert all(other > best for other in moved)
    assert probe.accuracy(X, LABELS) > 0.95
    assert torch.equal(fit_classifier(X, LABELS, l2=0.5).weight, probe.weight)


def test_a_constant_feature_has_no_weight():
    x = torch.cat((X, torch.ones(80, 1)), dim=1)
    probe = fit_classifier(x, LABELS)
    assert float(probe.weight[6].abs().max()) < 1e-6


def test_values_that_cannot_be_fitted_are_rejected():
    with rejects("x", (80, 6), "shape"):
        fit_ridge(X, torch.zeros(79, 1))
    with rejects("l2", -1.0, "range"):
        fit_ridge(X, torch.zeros(80, 1), -1.0)
    with rejects("labels", (80,), "type"):
        fit_classifier(X, torch.zeros(80))
    for fit, y in ((fit_ridge, X), (fit_classifier, LABELS)):
        with rejects("x", ..., "finite"):
            fit(X.where(X < 1, torch.nan), y)
    with rejects("y", ..., "finite"):
        fit_ridge(X, X.where(X < 1, torch.nan))
    with rejects("labels", -100, "range"):
        fit_classifier(X, LABELS.where(LABELS > 0, -100))
    with rejects("x", (0, 6), "empty"):
        fit_classifier(X[:0], LABELS[:0])
    with rejects("steps", 2, "converged"):
        fit_classifier(X, LABELS, l2=0.0, steps=2)


def test_labels_are_of_any_type_of_integers():
    wanted = fit_classifier(X, (LABELS > 0).long())
    for labels in (LABELS > 0, (LABELS > 0).int(), (LABELS > 0).to(torch.uint8)):
        assert torch.equal(fit_classifier(X, labels).weight, wanted.weight)
