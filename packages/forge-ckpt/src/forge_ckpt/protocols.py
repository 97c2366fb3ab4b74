"""What an object in the state of a checkpoint may offer; tensors, containers and plain values need nothing.

All but `Stateful` is optional and looked up by name.
"""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["ChecksState", "FillsState", "Path", "ReplacesState", "SelectsState", "Stateful"]

Path = tuple[Any, ...]
"""Keys from an object's own state down to a leaf."""


class Stateful(Protocol):
    """An object with state: a module, an optimizer, a loader."""

    def state_dict(self) -> dict[str, Any]:
        """Its state; tensors are written from where they are, and read into the same ones."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Restore it, after all ranks have read and verified theirs."""
        ...


class ReplacesState(Stateful, Protocol):
    """One that takes its state as it was saved, whatever shape its own has now."""

    load_replaces: bool


class SelectsState(Stateful, Protocol):
    """One that wants a part of what was saved."""

    def load_selects(self, saved: list[Path]) -> list[Path]:
        """Those of the saved paths below its name that it loads; the others are not missed."""
        ...


class FillsState(Stateful, Protocol):
    """One that can load although a part of its state was not saved."""

    def load_fills(self, saved: list[Path]) -> dict[str, Any]:
        """As much of its state as the saved paths can fill."""
        ...


class ChecksState(Stateful, Protocol):
    """One that can say that a state is not for it before anything changes."""

    def load_checks(self, state: dict[str, Any]) -> None:
        """Raise ValueError for a state that it could not load."""
        ...
