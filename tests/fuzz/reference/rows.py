"""What one optimizer step reads: samples of micro-batches of readers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass
class Rows:
    """Samples of one micro-batch of one reader; B samples of S tokens."""

    tokens: Tensor  # (B, S) int64
    labels: Tensor  # (B, S) int64, -100: none
    positions: Tensor  # (B, S) int64, or (B, 3, S)
    documents: Tensor  # (B, S) int64, -1 on padding
    weights: Tensor  # (B, S) float, weight of each label, 0 where labels are -100
    ids: Tensor  # (B,) int64 sample index, -1 for a padding sample
    source: Tensor  # (B,) int64
    extras: dict[str, Any] = field(default_factory=dict)  # images


@dataclass
class Step:
    """What one optimizer step reads."""

    micro_batches: list[list[Rows]]  # [reader][micro-batch]
    ids: list[int]  # sample indices of the step, in order
    digest: str  # as in the column `instances` of metrics.jsonl
    tokens: int  # as in the column `tokens`
    lr_multiplier: float  # of the phase
