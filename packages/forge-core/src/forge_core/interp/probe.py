"""Logit lens and linear probes of the residual stream.

Shapes: N samples (tokens), P features, C classes, Q targets, V vocabulary.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_core._shared.problems import invalid


def logit_lens(model: nn.Module, stream: Tensor) -> Tensor:
    """Return logits (B, S, V) of a residual stream (B, S, M) of any depth, by the model's final norm and head.

    nostalgebraist 2020, "interpreting GPT: the logit lens". For the last `resid_post` they are the model's own logits.
    ValueError for a model without `head`.
    """
    head: Any = getattr(model, "head", None)
    if not callable(head):
        rule = f"of type {type(model).__name__} must have a method head(stream)"
        raise invalid("model", "missing", ..., rule, "give a Transformer")
    logits: Tensor = head(stream)
    return logits


class LinearProbe(NamedTuple):
    """Linear probe: x (..., P) -> x weight + bias (..., C or Q), in float64."""

    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Predictions, or logits of classes."""
        return x.double() @ self.weight + self.bias

    def accuracy(self, x: Tensor, labels: Tensor) -> float:
        """Return the fraction of x (N, P) with the largest logit at its label (N,). Use other documents than for the fit."""
        return float((self(x).argmax(-1) == labels).double().mean())


def fit_ridge(x: Tensor, y: Tensor, l2: float = 1.0) -> LinearProbe:
    """Fit a linear prediction of y (N, Q) from x (N, P): least squares plus `l2` times the squared weights without the bias.

    Exact, in float64. Memory P * P; with l2 0 x must have full rank.
    """
    _check(x, y, l2)
    x, y = x.detach().double(), y.detach().double()
    mean_x, mean_y = x.mean(0), y.mean(0)
    x, y = x - mean_x, y - mean_y
    gram = x.T @ x + l2 * torch.eye(x.size(1), dtype=x.dtype, device=x.device)
    weight = torch.linalg.solve(gram, x.T @ y)
    return LinearProbe(weight, mean_y - mean_x @ weight)


def fit_classifier(x: Tensor, labels: Tensor, l2: float = 1.0, steps: int = 500) -> LinearProbe:
    """Fit a logistic regression of labels (N,), integers from 0, on x (N, P).

    Minimizes the sum of cross-entropies plus l2 / 2 times the squared weights without the bias, by L-BFGS in float64 from
    0: deterministic. Features are scaled to variance 1, and `l2` applies to the scaled ones. Raises ValueError if it has
    not converged after `steps`.
    """
    _check(x, labels, l2)
    if labels.is_floating_point() or labels.dim() != 1:
        rule, fix = f"{labels.dtype} must be integers (N,)", "use fit_ridge for numbers"
        raise invalid("labels", "type", tuple(labels.shape), rule, fix)
    if labels.min() < 0:
        fix = "leave out samples without a label"
        raise invalid("labels", "range", int(labels.min()), "must be 0 or more", fix)

    # L-BFGS converges slowly where features have different scales
    x, labels = x.detach().double(), labels.long()
    mean, spread = x.mean(0), x.std(0, correction=0)
    spread = torch.where(spread > 0, spread, 1.0)
    scaled = (x - mean) / spread  # (N, P)

    classes = int(labels.max()) + 1
    weight = torch.zeros(x.size(1), classes, dtype=x.dtype, device=x.device, requires_grad=True)
    bias = torch.zeros(classes, dtype=x.dtype, device=x.device, requires_grad=True)
    options = {"max_iter": steps, "tolerance_grad": 1e-9, "tolerance_change": 0.0}
    search = torch.optim.LBFGS([weight, bias], line_search_fn="strong_wolfe", **options)  # type: ignore[arg-type, unused-ignore]

    def loss() -> Tensor:
        search.zero_grad()
        errors = F.cross_entropy(scaled @ weight + bias, labels, reduction="sum")
        total = (errors + l2 / 2 * weight.square().sum()) / len(x)
        total.backward()
        return total

    # the last call gives the gradient at the result
    with torch.enable_grad():
        search.step(loss)
        loss()
    assert weight.grad is not None
    if float(weight.grad.abs().max()) > 1e-5:
        rule, fix = "are too few: the classifier has not converged", f"raise l2 {l2}, or steps"
        raise invalid("steps", "converged", steps, rule, fix)

    # back to features as they were given
    found = weight.detach() / spread[:, None]
    return LinearProbe(found, bias.detach() - mean @ found)


def _check(x: Tensor, y: Tensor, l2: float) -> None:
    """ValueError for samples that no probe can be fitted to."""
    if x.dim() != 2 or len(x) != len(y):
        rule = f"must be (samples, features) with the samples of y {tuple(y.shape)}"
        raise invalid("x", "shape", tuple(x.shape), rule, "flatten sequences and tokens of both")
    if not len(x):
        raise invalid("x", "empty", tuple(x.shape), "must have samples", "read more tokens")
    for name, values in (("x", x), ("y", y)):
        if not values.isfinite().all():
            fix = "leave out samples that hold nan or inf"
            raise invalid(name, "finite", ..., "must be finite", fix)
    if not l2 >= 0:
        raise invalid("l2", "range", l2, "must be 0 or more")
