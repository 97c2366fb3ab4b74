"""Groups of parameters for optimizers that references are trained with, by names and not by the number of dims."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

#: Vectors and stacks of vectors, in Forge and in transformers.
VECTORS = ("*norm.weight", "*norm?.weight", "*bias", "*sinks", "*_gate")


def groups_by_decay(
    named: Iterable[tuple[str, Tensor]], weight_decay: float
) -> list[dict[str, Any]]:
    """Matrices and embeddings decay, vectors do not."""
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    for name, parameter in named:
        found[any(fnmatchcase(name, pattern) for pattern in VECTORS)].append(parameter)
    return [{"params": p, "weight_decay": d} for p, d in zip(found, (weight_decay, 0.0))]
