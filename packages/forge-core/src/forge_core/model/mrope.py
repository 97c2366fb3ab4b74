"""Rotary positions of several axes: which pair of a head's dims turns by time, by row, by column.

Shapes: B rows, S tokens, D turned width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from forge_core._config import choice_problems, is_size
from forge_core._shared.fields import field
from forge_core._shared.problems import Problem, raise_problems

_LAYOUTS = ("chunked", "interleaved")


@dataclass(frozen=True)
class MRopeConfig:
    """Rotary positions of three axes (time, row, column), given as (B, 3, S); a text token has one number for all.

    "chunked" (Qwen2-VL): the first `sections[0]` pairs of a head's dims turn by time, the next `sections[1]` by row,
    the rest by column. "interleaved" (Qwen3-VL): the pairs turn by time, row and column in turn as far as row and
    column have pairs, and the rest by time.

        MRopeConfig((24, 20, 20)).axes[:5]      # (0, 1, 2, 0, 1)
    """

    sections: tuple[int, ...] = field(
        (24, 20, 20), "pairs of a head's dims for time, row and column: half of the turned width"
    )
    layout: Literal["chunked", "interleaved"] = field(
        "interleaved", "how the axes share the pairs: chunked (Qwen2-VL), interleaved (Qwen3-VL)"
    )

    def __post_init__(self) -> None:
        raise_problems("mrope", _problems(self))

    def problems(self, rotary_dim: int, mixer: str) -> Iterator[Problem]:
        """Problems of these positions in a model whose `mixer` rotates `rotary_dim` dims of a head."""
        if mixer != "attention":
            rule = f"is read only by mixer 'attention', and mixer is {mixer!r}"
            yield Problem("mrope", "mixer", ..., rule, "remove it")
        elif 2 * sum(self.sections) != rotary_dim:
            rule = f"must sum to half of the rotated width of a head, {rotary_dim} / 2"
            sections = list(self.sections)
            yield Problem("mrope.sections", "sum", sections, rule, "change them, or head_dim")

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


def _problems(c: MRopeConfig) -> Iterator[Problem]:
    sizes = len(c.sections) == 3 and all(is_size(pairs, 2**15) for pairs in c.sections)
    if not sizes:
        rule = "must be three whole numbers, at least 1"
        yield Problem("sections", "range", list(c.sections), rule, "use [24, 20, 20]")
    layout = list(choice_problems(c, "layout", _LAYOUTS))
    yield from layout
    if not layout and sizes and [c.axes.count(axis) for axis in range(3)] != list(c.sections):
        rule = "must give row and column at most a third of the pairs where they are interleaved"
        fix = "use [24, 20, 20], or layout chunked"
        yield Problem("sections", "interleaved", list(c.sections), rule, fix)
