"""How documents are put into rows, by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from forge_data._shared.fields import field
from forge_data._shared.problems import Problem, raise_problems
from forge_data.kinds import choice_problems, foreign_tables, integer_problem

__all__ = ["BestFitConfig", "FirstFitConfig", "PackingConfig"]

PACKINGS = ("concatenate", "first_fit", "best_fit")
_MAX_WINDOW = 1 << 24


def _window() -> Any:
    help = "documents that are planned at once: more fill rows better, and take memory for the plan"
    return field(1 << 16, help)


@dataclass(frozen=True)
class FirstFitConfig:
    """Pieces in the order of documents, each into the first row with room: `FirstFitConfig(window=4096)`."""

    window: int = _window()

    def __post_init__(self) -> None:
        raise_problems("first_fit", _window_problems(self.window))


@dataclass(frozen=True)
class BestFitConfig:
    """The longest pieces first, each into the row with the least room for it: `BestFitConfig(window=4096)`."""

    window: int = _window()

    def __post_init__(self) -> None:
        raise_problems("best_fit", _window_problems(self.window))


@dataclass(frozen=True)
class PackingConfig:
    """Packing of documents into rows: `PackingConfig("best_fit")`. Raises ValueError with one line per broken rule."""

    name: Literal["concatenate", "first_fit", "best_fit"] = "concatenate"
    """concatenate: all documents, cut into rows; first_fit, best_fit: documents stay whole where a row holds them,
    by a plan that is made once and cached"""
    first_fit: FirstFitConfig = field(FirstFitConfig)
    """settings of first_fit only"""
    best_fit: BestFitConfig = field(BestFitConfig)
    """settings of best_fit only"""

    def __post_init__(self) -> None:
        problems = [*choice_problems(self), *foreign_tables(self, PACKINGS[1:])]
        raise_problems("packing", problems)

    @property
    def window(self) -> int:
        """Documents planned at once, of the chosen name."""
        own: FirstFitConfig | BestFitConfig = getattr(self, self.name)
        return own.window


def _window_problems(window: Any) -> Iterator[Problem]:
    return integer_problem("window", window, 1, _MAX_WINDOW, "use 65536")
