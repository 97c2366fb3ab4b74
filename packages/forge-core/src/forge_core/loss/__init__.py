"""Token losses that return a sum and a count, so that the caller chooses the normaliser."""

from forge_core._shared.cross_entropy import TokenLoss
from forge_core.loss.breakdown import LossBreakdown
from forge_core.loss.config import CrossEntropyConfig
from forge_core.loss.token import cross_entropy, fused_cross_entropy

__all__ = [
    "CrossEntropyConfig",
    "LossBreakdown",
    "TokenLoss",
    "cross_entropy",
    "fused_cross_entropy",
]
