"""Cross-entropy against labels that are not quite certain (Szegedy et al. 2015)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def smoothed(model: nn.Module, batch: Any, *, smoothing: float = 0.1) -> dict[str, Tensor]:
    """Weighted sum of the losses, and how much of that weight the model would have guessed right."""
    given = {"positions": batch.positions, "document_ids": batch.document_ids}
    logits = model(batch.tokens, **given).float().flatten(0, 1)  # (B S, V)
    labels = batch.labels.flatten()
    weights = torch.ones_like(labels) if batch.weights is None else batch.weights.flatten()
    losses = F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
    right = (logits.argmax(-1) == labels) & (labels != -100)
    return {"loss": (losses * weights).sum(), "right": (right * weights).sum().float()}
