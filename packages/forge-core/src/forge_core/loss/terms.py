"""The terms of the loss of rows of logits, and their slope.

Shapes: N tokens, R rows of one block, V vocabulary. Of a row of logits l with the label y and
log p = log_softmax(l), with smoothing e and the coefficient c:

    cross-entropy  -log p_y
    smoothed       -(1 - e) log p_y - e / V sum_j log p_j          (Szegedy et al. 2016, section 7)
    z-loss         c (log sum_j exp l_j)^2                         (Chowdhery et al. 2022, section 5)
    slope          (1 + 2 c log sum_j exp l_j) p_j - (1 - e) [j = y] - e / V
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from forge_core._shared.problems import raise_problems
from forge_core.loss.config import term_problems


class Terms(NamedTuple):
    """Coefficients of the terms beside the cross-entropy."""

    z_loss: float
    label_smoothing: float

    def of_rows(self, logits: Tensor, log_p: Tensor, target: Tensor, out: Tensor) -> None:
        """Write log p_y, and where a term needs them sum_j log p_j and log sum_j exp l_j, into out (1 or 3, R).

        logits and log_p (R, V), target (R, 1).
        """
        out[0] = log_p.gather(1, target)[:, 0]
        if self.label_smoothing:
            out[1] = log_p.sum(-1)
        if self.z_loss:
            # of the largest entry: well-conditioned, and two passes cheaper than logsumexp
            top = logits.argmax(-1, keepdim=True)
            out[2] = (logits.gather(1, top).to(log_p.dtype) - log_p.gather(1, top))[:, 0]

    def empty(self, like: Tensor) -> Tensor:
        """What `of_rows` fills, for all rows of like (N, ...): (1 or 3, N)."""
        rows = 3 if self.z_loss or self.label_smoothing else 1
        return torch.zeros(rows, len(like), dtype=wide_dtype(like), device=like.device)

    def sums(
        self, rows: Tensor, valid: Tensor, weights: Tensor | None, vocab_size: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Over all rows: the trained sum, 0-dim, (cross-entropy, z-loss) of it, (2,), and each row's part of the
        former, (N,)."""

        def counted(values: Tensor) -> Tensor:
            # `where`, not a product: the sum is finite even if an ignored row is not
            values = values.where(valid, 0.0)
            return values if weights is None else values * weights

        def total(values: Tensor) -> Tensor:
            return counted(values).sum()

        log_p = counted(rows[0])
        plain = trained = log_p.sum().neg()
        z_loss = torch.zeros_like(plain)
        if self.label_smoothing:
            share = self.label_smoothing / vocab_size
            trained = (1 - self.label_smoothing) * plain - share * total(rows[1])
        if self.z_loss:
            z_loss = self.z_loss * total(rows[2].square())
            trained = trained + z_loss
        return trained, torch.stack((plain, z_loss)), log_p.neg()

    def slopes_(self, p: Tensor, target: Tensor, scale: Tensor, lse: Tensor | None) -> Tensor:
        """Turn p (R, V) into the slopes of the trained sum, in place.

        scale (R, 1) is zero for ignored rows; lse (R,) is the third row of `of_rows`, read for a z-loss alone.
        """
        factor = scale
        if self.z_loss:
            assert lse is not None
            # an ignored row may hold anything, and its factor stays zero
            factor = scale * (1 + 2 * self.z_loss * lse[:, None]).where(scale != 0, 1.0)
        p.mul_(factor)
        if self.label_smoothing:
            p.sub_(scale * (self.label_smoothing / p.size(1)))
        return p.scatter_add_(1, target, scale * (self.label_smoothing - 1))


def terms_of(z_loss: float, label_smoothing: float) -> Terms:
    """Checked coefficients; ValueError for one out of range."""
    raise_problems("cross_entropy", term_problems(z_loss, label_smoothing))
    return Terms(z_loss, label_smoothing)


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype of softmax and sums: fp32, or fp64 for fp64."""
    return torch.promote_types(x.dtype, torch.float32)
