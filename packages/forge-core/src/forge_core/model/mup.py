"""Maximal-update parametrization (muP): optimal learning rates and scales transfer from a small model to a larger one.

Of a model m times as wide as the base and k times as deep, against the same keys at the base, with Adam:

                              initial std     learning rate      forward
    matrices of blocks        1 / sqrt(m)     1 / (m sqrt(k))
    vectors of blocks                         1 / sqrt(k)
    embedding                                 1
    head                                      1                  logits / m
    projection of MTP         1 / sqrt(m)     1 / m
    output of a sublayer                                         / sqrt(k), and not in its initial std
    scores, if heads widen                                       by 1 / D, not 1 / sqrt(D)

The block of an MTP module is like any other block; its norms are like the one before the head.

Widths: Yang et al. 2022 (Tensor Programs V, table 8); depths: Yang et al. 2023 (Tensor Programs VI). Every width of
a block has to grow with dim: number of heads or width of a head, and hidden_dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from forge_core._config import choice_problems, size_problems
from forge_core._shared.fields import field
from forge_core._shared.problems import Problem, raise_problems


@dataclass(frozen=True)
class MuPConfig:
    """Base model, where both parametrizations are the same: `MuPConfig(base_dim=256, base_num_layers=4)`."""

    base_dim: int = field(256, "dim of the small model whose learning rates and scales are used")
    base_num_layers: int | None = field(
        None, "its num_layers; empty: depth changes neither learning rates nor scales"
    )
    base_head_dim: int | None = field(
        None,
        "its width of a head, where heads widen; empty: there are more heads of the same width",
    )

    def __post_init__(self) -> None:
        sizes = {"base_dim": 2**20, "base_num_layers": 2**12, "base_head_dim": 2**16}
        raise_problems("mup", size_problems(self, sizes))


@dataclass(frozen=True)
class Scales:
    """Factors of a model relative to its base with the same keys; all 1 in the standard parametrization."""

    width: float = 1.0  # m
    depth: float = 1.0  # k

    @property
    def std(self) -> float:
        """Factor of the initial std of a block's matrices."""
        return self.width**-0.5

    @property
    def branch(self) -> float:
        """Factor of the output of a sublayer."""
        return self.depth**-0.5

    @property
    def logits(self) -> float:
        """Factor of the logits."""
        return 1.0 / self.width

    def lr(self, *, matrix: bool) -> float:
        """Factor of the learning rate of a block's matrix (or stack of matrices), or of its vectors."""
        return self.branch / (self.width if matrix else 1.0)


def problems(config: Any) -> Iterator[Problem]:
    """Problems of [model.mup] and of keys that do not fit it."""
    yield from choice_problems(config, "parametrization", ("standard", "mup"))
    if config.parametrization == "standard" and config.mup != MuPConfig():
        rule = "is the table of parametrization 'mup', and parametrization is 'standard'"
        yield Problem("mup", "foreign", ..., rule, "remove it, or use mup")
    if config.parametrization != "mup":
        return
    if config.mixer != "attention":
        rule = "has no rule in parametrization 'mup', which is defined for attention"
        yield Problem("mixer", "parametrization", config.mixer, rule, "use that, or 'standard'")
    elif config.mup.base_head_dim is not None and config.attention.scale is not None:
        rule = f"takes the place of the scale of mup.base_head_dim {config.mup.base_head_dim}"
        scale = config.attention.scale
        yield Problem("attention.scale", "excludes", scale, rule, "give one of them")
