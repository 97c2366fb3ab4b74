"""Token losses that return a sum and a count, so that the caller chooses the normalizer."""

from forge_core._shared.cross_entropy import TokenLoss
from forge_core.loss.breakdown import LossBreakdown
from forge_core.loss.config import CrossEntropyConfig
from forge_core.loss.named import FUSED, LOSSES, OBJECTIVES, Objective
from forge_core.loss.token import LinearCrossEntropy, cross_entropy, fused_cross_entropy

__all__ = [
    "FUSED",
    "LOSSES",
    "OBJECTIVES",
    "CrossEntropyConfig",
    "LinearCrossEntropy",
    "LossBreakdown",
    "Objective",
    "TokenLoss",
    "cross_entropy",
    "fused_cross_entropy",
]
