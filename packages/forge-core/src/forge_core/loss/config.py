"""Configuration of the built-in losses."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from forge_core._shared.fields import field
from forge_core._shared.problems import Problem, raise_problems


@dataclass(frozen=True)
class CrossEntropyConfig:
    """Terms next to the cross-entropy: keywords of `cross_entropy` and `fused_cross_entropy`.

    `cross_entropy(logits, labels, **dataclasses.asdict(CrossEntropyConfig(z_loss=1e-4)))`
    """

    z_loss: float = field(
        0.0, "coefficient of the squared log-sum-exp of each token's logits (PaLM: 1e-4)"
    )
    label_smoothing: float = field(
        0.0, "fraction of the target that is spread evenly over the vocabulary"
    )

    def __post_init__(self) -> None:
        raise_problems("cross_entropy", self._problems())

    def _problems(self) -> Iterator[Problem]:
        if not 0 <= self.z_loss < math.inf:
            rule = "must be a finite number of at least 0"
            yield Problem("z_loss", "range", self.z_loss, rule, "use 1e-4, or 0 for none")
        if not 0 <= self.label_smoothing < 1:
            rule, fix = "must be at least 0 and below 1", "use 0.1, or 0 for none"
            yield Problem("label_smoothing", "range", self.label_smoothing, rule, fix)
