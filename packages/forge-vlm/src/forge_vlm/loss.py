"""The loss of each modality, as sums that ranks can add up.

Shapes: B rows, S tokens of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from forge_vlm.modalities import ModalityConfig, modality_ids, numbers

__all__ = ["ModalityLoss", "modality_losses"]


@dataclass(frozen=True)
class ModalityLoss:
    """The sum of losses of one modality's targets and what they weigh, 0-dim and without a graph."""

    sum: Tensor
    count: Tensor


def modality_losses(
    token_losses: Tensor,
    labels: Tensor,
    modalities: Mapping[str, ModalityConfig],
    *,
    weights: Tensor | None = None,
    ignore_index: int = -100,
) -> dict[str, ModalityLoss]:
    """{"text" and each discrete modality: the losses of its targets}, which add up to the whole loss.

        loss = cross_entropy(model(tokens), labels)
        parts = modality_losses(loss.token_losses, labels, config.modalities)
        mean = parts["image"].sum / parts["image"].count

    token_losses (B, S) as `TokenLoss` has them, weighted; labels (B, S), by whose ids a target is of a modality;
    weights (B, S) of labels. No host sync.
    """
    valid = labels != ignore_index
    weigh = valid.double() if weights is None else weights.double().where(valid, 0.0)
    ids = modality_ids(labels, None, modalities)
    named = {"text": 0} | {n: i for n, i in numbers(modalities).items() if modalities[n].discrete}
    found = {}
    for name, number in named.items():
        here = valid & (ids == number)
        losses = token_losses.detach().where(here, 0.0)
        found[name] = ModalityLoss(losses.sum(dtype=torch.float64), weigh.where(here, 0.0).sum())
    return found
