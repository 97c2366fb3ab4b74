"""Checkpoint state of a pipeline rank: its own part of what all ranks save together."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


class PartOfState:
    """State of `owner` (a model or an optimizer) on a rank that has some of the model's tensors.

    `names` are those of the whole model, `own` those of this rank. What a checkpoint holds for the others
    is theirs to load; what it holds for nobody is still reported as a mismatch.
    """

    def __init__(self, owner: Any, names: Collection[str], own: Collection[str]) -> None:
        self._owner = owner
        self._others = frozenset(names) - frozenset(own)

    def state_dict(self) -> dict[str, Any]:
        """The owner's."""
        found: dict[str, Any] = self._owner.state_dict()
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Into the owner."""
        self._owner.load_state_dict(state)

    def load_selects(self, saved: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Of the saved paths those that are not another rank's."""
        return [path for path in saved if not self._others.intersection(path)]
