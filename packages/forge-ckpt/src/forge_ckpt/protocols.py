"""Methods that an object in the state of a checkpoint may have; tensors, containers and plain values need none.

All but those of `Stateful` are optional and looked up by name. `WholeTensors` is what an export reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

__all__ = [
    "ChecksState",
    "FillsState",
    "OptionalState",
    "Path",
    "ReplacesState",
    "SelectsState",
    "Stateful",
    "WholeTensors",
]

Path = tuple[Any, ...]
"""Keys from an object's own state down to a leaf."""


class Stateful(Protocol):
    """An object with state: a module, an optimizer, a loader."""

    def state_dict(self) -> dict[str, Any]:
        """Its state; tensors in it are saved as they are, and a load fills the same tensors in place."""

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Restore it; called after all ranks have read and verified their states."""


class ReplacesState(Stateful, Protocol):
    """A stateful object that takes the saved state as it is, whatever structure its own has now."""

    load_replaces: bool


class OptionalState(Stateful, Protocol):
    """A stateful object of which a checkpoint may have nothing: it then loads an empty state."""

    load_optional: bool


class SelectsState(Stateful, Protocol):
    """A stateful object that loads a part of its saved state."""

    def load_selects(self, saved: list[Path]) -> list[Path]:
        """The paths that it loads, of the saved paths below its name; the others are not read."""


class FillsState(Stateful, Protocol):
    """A stateful object that can load although a part of its state was not saved."""

    def load_fills(self, saved: list[Path]) -> dict[str, Any]:
        """The part of its state that the saved paths can fill."""


class ChecksState(Stateful, Protocol):
    """A stateful object that can refuse a state before anything changes."""

    def load_checks(self, state: dict[str, Any]) -> None:
        """Raise ValueError for a state that it could not load."""


class WholeTensors(Protocol):
    """Tensors that are read one at a time; `meta` has shapes and dtypes of all, on the meta device."""

    meta: Mapping[str, Tensor]

    def read(self, name: str) -> Tensor:
        """The whole tensor, on the CPU."""
