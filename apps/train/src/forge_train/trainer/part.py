"""What a checkpoint holds of a model and an optimizer, and a pipeline rank's own part of it."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from torch import Tensor, nn


class NamedState:
    """State of an optimizer by parameter names, which fit any layout of ranks."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """`{name: {slot: tensor or float}}`."""
        found: dict[str, Any] = self._optimizer.named_state()
        return found

    def load_checks(self, state: dict[str, Any]) -> None:
        """Raise ValueError where a number of the state is none. Tensors were compared before."""
        for name, slots in self.state_dict().items():
            for slot, own in slots.items():
                value = state[name][slot]
                if not isinstance(own, Tensor) and type(value) is not type(own):
                    raise ValueError(f"{name}.{slot} {value!r:.80} must be a {type(own).__name__}")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The same, taken over."""
        self._optimizer.load_named_state(state)


def by_name(optimizer: Any) -> Any:
    """`optimizer` with its named state as its state; itself where it offers none."""
    return NamedState(optimizer) if hasattr(optimizer, "load_named_state") else optimizer


class PartOfState:
    """State of `owner` (a model or an optimizer) on a rank that has some of the model's tensors.

    `others` are the names of what only other ranks have. What a checkpoint holds under them is theirs to
    load; what it holds for nobody is still reported as a mismatch.
    """

    def __init__(self, owner: Any, others: Set[str]) -> None:
        self._owner = owner
        self._others = frozenset(others)

    def state_dict(self) -> dict[str, Any]:
        """The owner's."""
        found: dict[str, Any] = self._owner.state_dict()
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Into the owner."""
        self._owner.load_state_dict(state)

    def load_checks(self, state: dict[str, Any]) -> None:
        """The owner's, if it has any."""
        checks = getattr(self._owner, "load_checks", None)
        if checks is not None:
            checks(state)

    def load_selects(self, saved: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Of the saved paths those that are not another rank's."""
        return [path for path in saved if not self._others.intersection(path)]


def tensor_names(model: nn.Module) -> set[str]:
    """Names of all parameters and buffers."""
    return {name for name, _ in model.named_parameters()} | {n for n, _ in model.named_buffers()}
