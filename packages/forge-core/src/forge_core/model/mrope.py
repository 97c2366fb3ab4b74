"""Rotary positions of several axes: which pair of a head's dims turns by time, by row, by column.

Shapes: B rows, S tokens, D turned width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from forge_core._config import is_size, raise_problems, setting

_LAYOUTS = ("chunked", "interleaved")


@dataclass(frozen=True)
class MRopeConfig:
    """Rotary positions of three axes (time, row, column), given as (B, 3, S); a text token has one number for all.

    "chunked" (Qwen2-VL): the first `sections[0]` pairs of a head's dims turn by time, the next `sections[1]` by row,
    the rest by column. "interleaved" (Qwen3-VL): the pairs turn by time, row and column in turn as far as row and
    column have pairs, and the rest by time.

        MRopeConfig((24, 20, 20)).axes[:5]      # (0, 1, 2, 0, 1)
    """

    sections: tuple[int, ...] = setting(
        (24, 20, 20), "pairs of a head's dims for time, row and column: half of the turned width"
    )
    layout: Literal["chunked", "interleaved"] = setting(
        "interleaved", "how the axes share the pairs: chunked (Qwen2-VL), interleaved (Qwen3-VL)"
    )

    def __post_init__(self) -> None:
        raise_problems("mrope", _problems(self))

    def problems(self, rotary_dim: int, mixer: str) -> Iterator[str]:
        """Sentences about these positions in a model whose `mixer` turns `rotary_dim` dims of a head."""
        if mixer != "attention":
            yield f"mrope is read by mixer 'attention' alone, and mixer is {mixer!r}; remove it"
        elif 2 * sum(self.sections) != rotary_dim:
            yield (
                f"mrope.sections {list(self.sections)} must sum to half of the turned width of a head, {rotary_dim} "
                "/ 2; change them, or head_dim"
            )

    @property
    def axes(self) -> tuple[int, ...]:
        """The axis of each pair: 0 time, 1 row, 2 column."""
        if self.layout == "chunked":
            return tuple(axis for axis, pairs in enumerate(self.sections) for _ in range(pairs))
        return tuple(
            pair % 3 if pair < 3 * self.sections[pair % 3] else 0
            for pair in range(sum(self.sections))
        )

    def by_pair(self, positions: Tensor) -> Tensor:
        """The position that each pair turns by: (B, 3, S) -> (B, S, D / 2)."""
        # made on the device it would let the host wait
        axes = torch.tensor(self.axes).to(positions.device, non_blocking=True)
        return positions.index_select(1, axes).transpose(1, 2)


def _problems(c: MRopeConfig) -> Iterator[str]:
    sizes = len(c.sections) == 3 and all(is_size(pairs, 2**15) for pairs in c.sections)
    if not sizes:
        yield f"sections {list(c.sections)} must be three whole numbers, at least 1; use [24, 20, 20]"
    if c.layout not in _LAYOUTS:
        yield f"layout {c.layout!r} must be one of {', '.join(_LAYOUTS)}; use interleaved"
    elif sizes and [c.axes.count(axis) for axis in range(3)] != list(c.sections):
        yield (
            f"sections {list(c.sections)} must give row and column at most a third of the pairs where they are "
            "interleaved; use [24, 20, 20], or layout chunked"
        )
