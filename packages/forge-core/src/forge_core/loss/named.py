"""Losses by name, and objectives: functions of a model and a batch that compute a loss of their own.

Shapes: B sequences, S tokens of a sequence, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from forge_core._shared.problems import ProblemError, invalid
from forge_core.loss.token import cross_entropy, fused_cross_entropy
from forge_core.registry import Registry

#: The built-in loss that the head computes: of the stream (B, S, D) and the head's weight (V, D) in place of logits.
FUSED = "fused_cross_entropy"
LOSSES = Registry(
    "train.loss",
    "forge.losses",
    ("logits", "labels", "weights"),
    {"cross_entropy": cross_entropy, FUSED: fused_cross_entropy},
)
OBJECTIVES = Registry("train.objective", "forge.objectives", ("model", "batch"), {})


class Objective:
    """`fn(model, batch, **options) -> {name: 0-dim sum}`, of which the first is trained.

        objective = Objective("my_lab.losses:distil", {"temperature": 2.0})
        trained, *others = objective(model, batch)

    The sums of all micro-batches and ranks add up, and are divided by the step's normalizer: the sum of
    `fn.count(batch)` over the ranks where fn defines it, a number that the host knows before the forward, else
    the weight of the labels. The other sums are columns of metrics. Every rank calls the model equally often.

    Raises ValueError for an unknown name and options that fn does not take, and `error` where fn returns no sums.
    """

    def __init__(
        self, name: str, options: Mapping[str, Any], error: type[Any] = ProblemError
    ) -> None:
        self._function = OBJECTIVES.checked(name, options)
        self._name, self._options, self._error = name, options, error
        self.names: tuple[str, ...] = ()

    def __call__(self, model: nn.Module, batch: Any) -> list[Tensor]:
        """The sums of a micro-batch on the device, the one that is trained first."""
        sums: Any = self._function(model, batch, **self._options)
        values: list[Any] = list(sums.values()) if isinstance(sums, dict) else [None]
        if not values or not all(isinstance(v, Tensor) and v.dim() == 0 for v in values):
            shapes = [tuple(v.shape) if isinstance(v, Tensor) else type(v).__name__ for v in values]
            what = f"{type(sums).__name__} ({', '.join(map(str, shapes))})"
            rule = f"must give a dict of 0-dim tensors, the trained one first, and gave {what}"
            fix = "sum over sequences and tokens"
            raise invalid(OBJECTIVES.key, "type", self._name, rule, fix, kind=self._error)
        self.names = tuple(sums)
        return values

    def count(self, batch: Any) -> float:
        """The number that this batch adds to the normalizer."""
        offered = getattr(self._function, "count", None)
        return float(batch.label_weight if offered is None else offered(batch))

    def columns(self, others: Sequence[float]) -> dict[str, float]:
        """`objective.<name>` of the sums after the first, over all ranks."""
        return {f"objective.{name}": value for name, value in zip(self.names[1:], others)}
