"""What a checkpoint holds of a model and an optimizer, and a pipeline rank's own part of it."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from torch import Tensor, nn


class NamedState:
    """State of an optimizer by parameter names, which fit any layout of ranks.

    `names` are those of the whole model, `frozen` the parameters here that this life of the run never trains.
    Another life may have trained others: what it saved of those that are frozen now is left, and what was
    frozen then begins as built.
    """

    def __init__(self, optimizer: Any, names: Set[str], frozen: Set[str]) -> None:
        self._optimizer = optimizer
        self._names, self._frozen = frozenset(names), frozenset(frozen)

    def state_dict(self) -> dict[str, Any]:
        """`{name: {slot: tensor or float}}`."""
        found: dict[str, Any] = self._optimizer.named_state()
        return found

    def load_checks(self, state: dict[str, Any]) -> None:
        """Raise ValueError where a number of the state is none. Tensors were compared before."""
        for name, slots in self.load_fills([(name,) for name in state]).items():
            for slot, own in slots.items():
                value = state[name][slot]
                if not isinstance(own, Tensor) and type(value) is not type(own):
                    raise ValueError(f"{name}.{slot} {value!r:.80} must be a {type(own).__name__}")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The same, taken over."""
        self._optimizer.load_named_state({**self.state_dict(), **state})

    def load_selects(self, saved: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Of the saved paths those that are not of a frozen parameter."""
        return [path for path in saved if not self._frozen.intersection(path[:1])]

    def load_fills(self, saved: list[tuple[Any, ...]]) -> dict[str, Any]:
        """The state of those parameters that had one when it was saved."""
        names, own = {path[0] for path in saved if path}, self.state_dict()
        if not names <= self._names:  # another optimizer's: all that is missing shall be said
            return own
        return {name: slots for name, slots in own.items() if name in names}


def by_name(optimizer: Any, model: nn.Module, names: Set[str]) -> Any:
    """`optimizer` with its named state as its state; itself where it offers none.

    `model` is this rank's part of the one whose tensors `names` are.
    """
    if not hasattr(optimizer, "load_named_state"):
        return optimizer
    here = {name for name, _ in model.named_parameters()}
    return NamedState(optimizer, names, here - optimizer.named_state().keys())


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
        """Of the saved paths those that are not another rank's, and that the owner wants."""
        select = getattr(self._owner, "load_selects", list)
        return [path for path in select(saved) if not self._others.intersection(path)]

    def load_fills(self, saved: list[tuple[Any, ...]]) -> dict[str, Any]:
        """What the owner can fill with them: all its state where it does not say."""
        fills = getattr(self._owner, "load_fills", None)
        found: dict[str, Any] = self.state_dict() if fills is None else fills(saved)
        return found


def tensor_names(model: nn.Module) -> set[str]:
    """Names of all parameters and buffers."""
    return {name for name, _ in model.named_parameters()} | {n for n, _ in model.named_buffers()}
