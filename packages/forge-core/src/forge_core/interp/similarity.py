"""Similarity of two representations of the same samples: CKA and SVCCA.

Shapes: N samples, P and Q features. Tokens are samples: flatten (B, S, M) to (B * S, M). Computed in float64; results are
Python numbers, which cost one host sync on an accelerator, and nan if x or y is constant.
"""

import math

import torch
from torch import Tensor

from forge_core._shared.problems import invalid


def linear_cka(x: Tensor, y: Tensor) -> float:
    """Return the linear CKA of x (N, P) and y (N, Q), from 0 to 1 (Kornblith et al. 2019, equation 4).

    Invariant to rotation, shift and scale of x. With few samples it is near 1 for any two: see
    `debiased_linear_cka`. Memory: P * Q.
    """
    x, y = _centered(x, y)
    return float((x.T @ y).square().sum() / ((x.T @ x).norm() * (y.T @ y).norm()))


def debiased_linear_cka(x: Tensor, y: Tensor) -> float:
    """Return the linear CKA by the unbiased HSIC (Song et al. 2012; Nguyen et al. 2021): about 0 for random x and y.

    Shapes (N, P) and (N, Q). May be below 0. Needs N of 4 or more. Memory: N * N; take a sample of the tokens.
    """
    between, of_x, of_y = _hsics(x, y)
    return _normalized(between, of_x, of_y)


class MinibatchCKA:
    """Debiased linear CKA of more samples than one Gram matrix holds: HSICs of batches are averaged (Nguyen et al. 2021).

        cka = MinibatchCKA()
        for x, y in batches:      # (N, P) and (N, Q), N of 4 or more
            cka.update(x, y)
        cka.value()

    Each batch has the same weight, so use batches of equal size. For one batch it is `debiased_linear_cka`. Memory: N * N
    of one batch.
    """

    def __init__(self) -> None:
        self._sums = [0.0, 0.0, 0.0]
        self._batches = 0

    def update(self, x: Tensor, y: Tensor) -> None:
        """Count one batch of samples."""
        self._sums = [a + b for a, b in zip(self._sums, _hsics(x, y))]
        self._batches += 1

    def value(self) -> float:
        """CKA of all batches so far; ValueError before the first."""
        if not self._batches:
            raise invalid("MinibatchCKA", "empty", ..., "has no batch yet", "call update first")
        between, of_x, of_y = self._sums
        return _normalized(between, of_x, of_y)


def svcca(x: Tensor, y: Tensor, *, share: float = 0.99) -> float:
    """Return the mean canonical correlation of x (N, P) and y (N, Q), from 0 to 1 (SVCCA, Raghu et al. 2017).

    It compares the first singular directions of each that explain the fraction `share` of the variance. Needs many more
    samples than directions: with as many the result is 1 for any two, so this raises ValueError.
    """
    if not 0.0 < share <= 1.0:
        raise invalid("share", "range", share, "must be above 0 and at most 1")
    x, y = _centered(x, y)
    if not (x.any() and y.any()):
        return math.nan
    bases = [_main_directions(z, share) for z in (x, y)]
    most = bases[0].size(1) + bases[1].size(1)
    if most >= len(x):
        sizes = " and ".join(str(basis.size(1)) for basis in bases)
        rule = f"is the number of samples, and must be above that of the directions of x and y, {sizes}"
        raise invalid("x", "directions", len(x), rule, "read more tokens, or lower share")
    return float(torch.linalg.svdvals(bases[0].T @ bases[1]).clamp(max=1.0).mean())


def _checked(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """x and y in float64; ValueError unless they have the same number of samples."""
    for name, value in (("x", x), ("y", y)):
        if value.dim() != 2 or not value.numel():
            rule, fix = "must be (samples, features) of one or more", "flatten sequences and tokens"
            raise invalid(name, "shape", tuple(value.shape), rule, fix)
    if len(x) != len(y):
        rule = f"samples must be of the tokens of y, which has {len(y)}"
        raise invalid("x", "length", len(x), rule, "give both of the same tokens")
    return x.detach().double(), y.detach().double()


def _centered(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """x and y in float64 around their means."""
    x, y = (_without_mean(z) for z in _checked(x, y))
    return x, y


def _without_mean(x: Tensor) -> Tensor:
    """x (N, P) around its mean; a constant feature is exactly 0, where rounding would leave noise."""
    centered = x - x.mean(0)
    constant = centered.abs().amax(0) <= 1e-12 * x.abs().amax(0)
    return centered.masked_fill(constant, 0.0)


def _hsics(x: Tensor, y: Tensor) -> tuple[float, float, float]:
    """Unbiased HSIC of x and y, of x with itself, of y with itself."""
    x, y = _centered(x, y)  # the same, and more exact where means are large
    if len(x) < 4:
        raise invalid("x", "range", len(x), "samples must be 4 or more", "read more tokens")
    a, b = x @ x.T, y @ y.T
    return _unbiased_hsic(a, b), _unbiased_hsic(a, a), _unbiased_hsic(b, b)


def _normalized(between: float, of_x: float, of_y: float) -> float:
    """CKA of three HSICs; nan if x or y is constant."""
    return math.nan if of_x <= 0 or of_y <= 0 else between / math.sqrt(of_x * of_y)


def _unbiased_hsic(a: Tensor, b: Tensor) -> float:
    """Unbiased HSIC of Gram matrices (N, N), without their diagonals (Song et al. 2012)."""
    n = len(a)
    a, b = (gram - torch.diag(gram.diagonal()) for gram in (a, b))
    trace = (a * b).sum()
    products = a.sum() * b.sum() / ((n - 1) * (n - 2))
    return float((trace + products - 2 / (n - 2) * (a.sum(0) @ b.sum(0))) / (n * (n - 3)))


def _main_directions(x: Tensor, share: float) -> Tensor:
    """Left singular vectors (N, R) of the first R that explain `share` of the variance of x (N, P)."""
    u, s, _ = torch.linalg.svd(x, full_matrices=False)
    explained = s.square().cumsum(0) / s.square().sum()
    # rounding may leave the last sum below 1
    count = min(int((explained < share - 1e-12).sum()) + 1, int((s > s[0] * 1e-12).sum()))
    return u[:, : max(count, 1)]
