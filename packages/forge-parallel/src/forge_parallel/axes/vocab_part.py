"""A rank's part of a vocabulary, and the terms of a loss over all parts.

Shapes: N tokens, R rows of one block, W ids of a rank. Of a row of logits l with the label y, Z = sum_j exp l_j over
all V ids, smoothing e and the coefficient c:

    cross-entropy  log Z - l_y
    smoothed       log Z - (1 - e) l_y - e / V sum_j l_j           (Szegedy et al. 2016, section 7)
    z-loss         c (log Z)^2                                     (Chowdhery et al. 2022, section 5)
    slope          (1 + 2 c log Z) exp(l_j - log Z) - (1 - e) [j = y] - e / V
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from forge_parallel._shared.problems import invalid
from forge_parallel._torch_compat import all_gather
from forge_parallel.axes.collectives import NamedGroup

# Elements of one fp32 block: on a CPU a share of its cache, on a GPU enough to amortise kernel launches.
_BLOCK_CPU = 2**20
_BLOCK_DEVICE = 2**27


@dataclass(frozen=True)
class VocabLoss:
    """Sum of token losses, 0-dim fp32 with a graph, and what it weighs; equal on all ranks, and not to be summed.

    count: the number of valid tokens in int64, or with weights their sum in float64. To show, without a graph:
    cross_entropy, the sum without smoothing and z-loss, z_loss, that part of the sum, and token_losses, what each
    label adds to cross_entropy, in the labels' shape.
    """

    sum: Tensor
    count: Tensor
    cross_entropy: Tensor
    z_loss: Tensor
    token_losses: Tensor


class VocabPart(NamedTuple):
    """Ids rank W to (rank + 1) W, of which those from vocab_size on are padding; and the coefficients of the loss."""

    group: NamedGroup
    width: int
    vocab_size: int
    z_loss: float
    label_smoothing: float

    @classmethod
    def of(
        cls, group: NamedGroup, width: int, vocab_size: int | None, terms: tuple[float, float]
    ) -> VocabPart:
        """ValueError for a vocabulary that `width` does not cut, and for a coefficient out of range."""
        ids, (z_loss, label_smoothing) = vocab_size or width * group.size, terms
        if -(-ids // group.size) != width:
            rule = f"over {group.size} ranks must give parts of {width} ids, as there are"
            raise invalid(
                "vocab_size", "shards", ids, rule, "give the size of the whole vocabulary"
            )
        if not 0.0 <= z_loss < float("inf"):
            rule = "must be finite and at least 0"
            raise invalid("z_loss", "range", z_loss, rule, "use 1e-4, or 0 for none")
        if not 0.0 <= label_smoothing < 1.0:
            rule = "must be at least 0 and below 1"
            raise invalid(
                "label_smoothing", "range", label_smoothing, rule, "use 0.1, or 0 for none"
            )
        return cls(group, width, ids, z_loss, label_smoothing)

    @property
    def real(self) -> int:
        """Ids of this rank that are no padding."""
        return min(max(self.vocab_size - self.group.rank * self.width, 0), self.width)

    def find(self, ids: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Column (N, 1) of each label, 0 where it is not here, and whether it is here (N,)."""
        local = ids - self.group.rank * self.width
        is_local = valid.clone()
        if self.group.rank:
            is_local &= local >= 0
        # no upper bound on the last rank: there an id beyond the vocabulary fails in the gather instead of counting 0
        if self.group.rank < self.group.size - 1:
            is_local &= local < self.width
        return local.where(is_local, 0)[:, None], is_local

    def empty(self, like: Tensor) -> Tensor:
        """What `of_rows` fills, for all rows of like (N, ...): (2 or 3, N)."""
        return torch.zeros(
            3 if self.label_smoothing else 2, len(like), dtype=wide_dtype(like), device=like.device
        )

    def of_rows(self, logits: Tensor, target: Tensor, out: Tensor) -> None:
        """Write log Z, l_y and, to smooth, sum_j l_j of this part of logits (R, W) into out (2 or 3, R)."""
        out[0] = logits.logsumexp(dim=-1)
        out[1] = logits.gather(1, target)[:, 0]
        if self.label_smoothing:
            out[2] = logits[:, : self.real].sum(-1)

    def join(self, rows: Tensor, is_local: Tensor) -> Tensor:
        """The same of whole rows of logits: one all-gather."""
        rows[1] = rows[1].where(is_local, 0.0)
        size = self.group.size
        if size == 1:
            return rows
        parts = all_gather(rows, size, self.group.name).view(size, len(rows), -1)
        return torch.cat((parts[:, :1].logsumexp(dim=0), parts[:, 1:].sum(dim=0)))

    def sums(
        self, rows: Tensor, valid: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Over whole rows (2 or 3, N): the trained sum, 0-dim, (cross-entropy, z-loss) of it, (2,), and each row's part
        of the former, (N,)."""

        def counted(values: Tensor) -> Tensor:
            values = values.where(valid, 0.0)  # an ignored row may hold anything
            return values if weights is None else values * weights

        def total(values: Tensor) -> Tensor:
            return counted(values).sum()

        each = counted(rows[0] - rows[1])
        plain = trained = each.sum()
        z_loss = torch.zeros_like(plain)
        if self.label_smoothing:
            trained = plain + self.label_smoothing * total(rows[1] - rows[2] / self.vocab_size)
        if self.z_loss:
            z_loss = self.z_loss * total(rows[0].square())
            trained = trained + z_loss
        return trained, torch.stack((plain, z_loss)), each

    def slopes_(
        self, logits: Tensor, log_z: Tensor, target: Tensor, is_local: Tensor, scale: Tensor
    ) -> Tensor:
        """Turn logits (R, W) into the slopes of the trained sum, in place; scale (R, 1) is 0 for ignored rows."""
        factor = scale
        if self.z_loss:
            factor = scale * (1 + 2 * self.z_loss * log_z[:, None]).where(scale != 0, 1.0)
        p = logits.sub_(log_z[:, None]).exp_().mul_(factor)
        if self.label_smoothing:
            p[:, : self.real].sub_(scale * (self.label_smoothing / self.vocab_size))
        return p.scatter_add_(1, target, scale * (self.label_smoothing - 1) * is_local[:, None])


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype of softmax and sums: fp32, or fp64 for fp64."""
    return torch.promote_types(x.dtype, torch.float32)


def row_blocks(logits: Tensor) -> Iterator[slice]:
    """Slices of rows whose fp32 copy is a block."""
    limit = _BLOCK_CPU if logits.device.type == "cpu" else _BLOCK_DEVICE
    return slices(len(logits), max(1, limit // max(1, logits.size(1))))


def slices(length: int, size: int) -> Iterator[slice]:
    """[0, length) in parts of `size`."""
    return (slice(start, start + size) for start in range(0, length, size))


def label_scales(
    labels: Tensor, weights: Tensor | None, ignore_index: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Of labels (...): ids (N,) int64, whether each is valid, weights (N,) or None, and what they weigh.

    ValueError unless labels are integers, and weights floating point and one for each label."""
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise invalid("labels", "dtype", labels.dtype, "must be ids in integers", "use torch.int64")
    ids = labels.reshape(-1).to(torch.int64)
    valid = ids != ignore_index
    if weights is None:
        return ids, valid, None, valid.sum()
    if not weights.is_floating_point():
        rule = "must be floating-point numbers"
        raise invalid("weights", "dtype", weights.dtype, rule, "cast them")
    if weights.shape != labels.shape:
        rule = f"must be one for each of labels {tuple(labels.shape)}"
        raise invalid("weights", "shape", tuple(weights.shape), rule, "reshape them")
    flat = weights.reshape(-1).to(dtype).where(valid, 0.0)
    return ids, valid, flat, flat.double().sum()


def check_labels(labels: Tensor, valid: Tensor, num_ids: int) -> None:
    """ValueError, on a CPU, for a valid label that is no id."""
    if type(labels) is not Tensor or labels.device.type != "cpu":
        return
    wrong = labels[valid & ((labels < 0) | (labels >= num_ids))]
    if wrong.numel():
        rule, fix = (
            f"must be in [0, {num_ids}) or ignore_index",
            "enlarge the vocabulary or check the tokenizer",
        )
        raise invalid("labels", "range", int(wrong[0]), rule, fix)
