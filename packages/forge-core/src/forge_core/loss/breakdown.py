"""What to log of a loss next to its sum: its terms, and the losses of labels of each source and modality.

Shapes: B sequences, S tokens of a sequence, K sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_IGNORE = -100


@dataclass(frozen=True)
class LossBreakdown:
    """A token loss that also returns the sums of its parts.

        breakdown = LossBreakdown({"z_loss": 1e-4}, sources=("web", "code"))
        sums = breakdown(cross_entropy, logits, labels, weights, sources=sources)   # (K,)
        sums[0].backward()
        print(breakdown.means(sums[1:].tolist()))               # {"z_loss": ..., "source.web": ..., "source.code": ...}

    terms: coefficients of the loss, which are its keywords; those that are not 0 have a sum.
    sources: names of sources by number. ranges: (first id, one after the last) of modalities by name; labels in no
    range are text. Sums add up over micro-batches and ranks.
    """

    terms: Mapping[str, float] = field(default_factory=dict)
    sources: tuple[str, ...] = ()
    ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def used_terms(self) -> tuple[str, ...]:
        """Terms next to the cross-entropy that are switched on."""
        return tuple(name for name in ("z_loss", "label_smoothing") if self.terms.get(name))

    @property
    def groups(self) -> tuple[str, ...]:
        """Groups of labels that have a loss of their own: `source.<name>`, then `modality.<name>`."""
        modalities = ("text", *self.ranges) if self.ranges else ()
        of_source = (f"source.{name}" for name in self.sources)
        return (*of_source, *(f"modality.{name}" for name in modalities))

    @property
    def num_sums(self) -> int:
        """K: the trained sum, one for each term, and the loss and the weight of each group."""
        return 1 + len(self.used_terms) + 2 * len(self.groups)

    def __call__(
        self, loss: Callable[..., Any], *inputs: Any, sources: Tensor | None = None, **options: Any
    ) -> Tensor:
        """Sums (K,) of a loss that returns a `TokenLoss`, or its 0-dim sum if K is 1.

        `inputs` are those of the loss, then labels (B, S) and weights (B, S) or None; sources (B, S) numbers. The first
        sum is the plain cross-entropy with the gradient of the whole loss. The others are numbers: the terms, the
        cross-entropy of each group, and the weights of each group.
        """
        *inputs_of_loss, labels, weights = inputs
        found = loss(*inputs_of_loss, labels, weights=weights, **self.terms, **options)
        if self.num_sums == 1:
            total: Tensor = found.sum
            return total
        trained, plain = found.sum.detach(), found.cross_entropy
        terms = {"z_loss": found.z_loss, "label_smoothing": trained - found.z_loss - plain}
        sums = [plain + (found.sum - trained), *(terms[name] for name in self.used_terms)]
        if self.groups:
            valid = labels != _IGNORE
            weighing = valid.to(plain.dtype) if weights is None else weights.where(valid, 0.0)
            masks = self._masks(labels, sources)
            for each in (found.token_losses, weighing.to(plain.dtype)):
                # a sum for each: adding by index has no order on a GPU
                sums += [each.where(mask, 0.0).sum() for mask in masks]
        return torch.stack(sums)

    def means(self, others: Sequence[float]) -> dict[str, float]:
        """Terms and the mean loss of each group by name, of the sums after the first over all ranks; nan without labels."""
        values = iter(others)
        found = dict(zip(self.used_terms, values))
        losses, weights = ([next(values) for _ in self.groups] for _ in range(2))
        means = (loss / weight if weight else math.nan for loss, weight in zip(losses, weights))
        return found | dict(zip(self.groups, means))

    def columns(
        self, others: Sequence[float], *, mtp: bool = False, fractions: bool = False
    ) -> dict[str, float]:
        """Columns of metrics: `means` as `loss.<name>`.

        mtp: a last sum is the mean of tokens of MTP, `loss.mtp`. fractions: also `share.source.<name>`, the fraction of
        the labels of a source, of sums that are over the weight of all labels.
        """
        found = self.means(others)
        if mtp:
            found["mtp"] = others[self.num_sums - 1]
        columns = {f"loss.{name}": value for name, value in found.items()}
        weights = self.weights(others) if fractions else {}
        return columns | {f"share.{n}": w for n, w in weights.items() if n.startswith("source.")}

    def weights(self, others: Sequence[float]) -> dict[str, float]:
        """What the labels of each group weigh, of the same sums."""
        first = len(self.used_terms) + len(self.groups)
        return dict(zip(self.groups, others[first:]))

    def _masks(self, labels: Tensor, sources: Tensor | None) -> list[Tensor]:
        """Masks (B, S) bool of the labels of each group."""
        found = [sources == number for number in range(len(self.sources)) if sources is not None]
        if not self.ranges:
            return found
        modalities = [(labels >= first) & (labels < end) for first, end in self.ranges.values()]
        return [*found, ~torch.stack(modalities).any(0), *modalities]
