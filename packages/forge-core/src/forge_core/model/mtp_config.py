"""Configuration of the modules that predict tokens further ahead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from forge_core._config import is_finite, is_size
from forge_core._shared.fields import field
from forge_core._shared.problems import Problem, raise_problems


@dataclass(frozen=True)
class MTPConfig:
    """Modules that predict further ahead: `MTPConfig(num_modules=1, weight=0.3)`."""

    num_modules: int = field(
        0,
        "modules, of which the k-th predicts the token k + 1 ahead; 0: none; not run in evaluation",
    )
    weight: float = field(
        0.3, "of the mean of their losses beside the loss of the next token, with its normaliser"
    )

    def __post_init__(self) -> None:
        raise_problems("mtp", _problems(self))


def _problems(c: MTPConfig) -> Iterator[Problem]:
    if c.num_modules != 0 and not is_size(c.num_modules, 64):
        yield Problem(
            "num_modules", "range", c.num_modules, "must be a whole number from 0 to 64", "use 1"
        )
    if not (is_finite(c.weight) and c.weight > 0.0):
        yield Problem("weight", "range", c.weight, "must be a finite number above 0", "use 0.3")
