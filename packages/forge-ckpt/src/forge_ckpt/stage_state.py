"""State of a part of a model in a checkpoint of the whole model: of a pipeline stage, some tensors, other dtypes; optional objects."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, cast

import torch
from torch import Tensor, nn

from forge_ckpt._shared.problems import invalid
from forge_ckpt.protocols import Path

__all__ = ["InDtypes", "NamedState", "OptionalObject", "SomeTensors", "StageState", "tensor_names"]


class NamedState:
    """State of an optimizer by parameter name (`named_state`, `load_named_state`), which fits any layout of ranks.

    `names` are the tensors of the whole model, `frozen` the parameters of this rank that this run never trains.
    An earlier life of the run may have trained others: saved state of a parameter that is frozen now is left
    out, and a parameter that was frozen then starts with the state as built. So does one of which the optimizer calls saved
    slots outdated (`outdated_slots(name, saved slots)`, optional).
    """

    def __init__(self, optimizer: Any, names: Set[str], frozen: Set[str]) -> None:
        self._optimizer = optimizer
        self._names, self._frozen = frozenset(names), frozenset(frozen)

    @classmethod
    def of(cls, optimizer: Any, model: nn.Module, names: Set[str]) -> Any:
        """`optimizer` wrapped, or itself if it has no named state; `model` is this rank's part of the model."""
        if not hasattr(optimizer, "load_named_state"):
            return optimizer
        here = {name for name, _ in model.named_parameters()}
        return cls(optimizer, names, here - optimizer.named_state().keys())

    def state_dict(self) -> dict[str, Any]:
        """`{name: {slot: tensor or float}}`."""
        found: dict[str, Any] = self._optimizer.named_state()
        return found

    def load_checks(self, state: dict[str, Any]) -> None:
        """Raise ValueError for a saved value that is not a number where one is needed. Tensors are compared before."""
        for name, slots in self.load_fills([(name,) for name in state]).items():
            for slot, own in slots.items():
                value = state[name].get(slot, own)
                if not isinstance(own, Tensor) and type(value) is not type(own):
                    rule = f"must be a {type(own).__name__}"
                    raise invalid(f"{name}.{slot}", "type", value, rule)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load `state`; parameters that are not in it keep their current state."""
        own = self.state_dict()
        found = {name: {**own.get(name, {}), **slots} for name, slots in state.items()}
        self._optimizer.load_named_state({**own, **found})

    def load_selects(self, saved: list[Path]) -> list[Path]:
        """The saved paths, without those of frozen parameters and outdated slots."""
        outdated = self._outdated(saved)
        return [p for p in saved if p[:2] not in outdated and not self._frozen.intersection(p[:1])]

    def load_fills(self, saved: list[Path]) -> dict[str, Any]:
        """The state of those parameters that had one when it was saved."""
        names, own = {path[0] for path in saved if path}, self.state_dict()
        # State of another optimizer: ask for everything, so that the error names all that is missing.
        if not names <= self._names:
            return own
        outdated = self._outdated(saved)
        renewed, kept = {path[0] for path in outdated}, {path[:2] for path in saved} - outdated
        found = {
            name: {s: v for s, v in slots.items() if name not in renewed or (name, s) in kept}
            for name, slots in own.items()
            if name in names
        }
        return {name: slots for name, slots in found.items() if slots}

    def _outdated(self, saved: list[Path]) -> set[Path]:
        """(name, slot) of slots that the optimizer has no use for any more."""
        find = getattr(self._optimizer, "outdated_slots", None)
        slots: dict[Any, set[Any]] = {}
        for path in saved if find else ():
            if len(path) > 1:
                slots.setdefault(path[0], set()).add(path[1])
        return {(name, s) for name, own in slots.items() for s in cast(Any, find)(name, own)}


class _Wrapper:
    """An object with the state of its owner; a subclass changes a part."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def state_dict(self) -> dict[str, Any]:
        """The state of the owner."""
        found: dict[str, Any] = self._owner.state_dict()
        return found

    def load_state_dict(self, state: Any) -> None:
        """Load `state` into the owner."""
        self._owner.load_state_dict(state)

    def load_checks(self, state: dict[str, Any]) -> None:
        """The checks of the owner, if it has any."""
        checks = getattr(self._owner, "load_checks", None)
        if checks is not None:
            checks(state)


class StageState(_Wrapper):
    """State of `owner` (a model or an optimizer) on a rank that has some of the model's tensors.

    `others` are the names of tensors that only other ranks have. Saved state under those names is theirs to
    load; saved state that belongs to no rank is still reported as a mismatch.
    """

    def __init__(self, owner: Any, others: Set[str]) -> None:
        super().__init__(owner)
        self._others = frozenset(others)

    def load_selects(self, saved: list[Path]) -> list[Path]:
        """The saved paths that the owner selects, without those of other ranks."""
        select = getattr(self._owner, "load_selects", list)
        return [path for path in select(saved) if not self._others.intersection(path)]

    def load_fills(self, saved: list[Path]) -> dict[str, Any]:
        """The part of the owner's state that the saved paths can fill; all of it if the owner has no `load_fills`."""
        fills = getattr(self._owner, "load_fills", None)
        found: dict[str, Any] = self.state_dict() if fills is None else fills(saved)
        return found


class SomeTensors:
    """The tensors of a model under some of its names; a load leaves the others as they are."""

    def __init__(self, model: nn.Module, names: Set[str]) -> None:
        self._model, self._names = model, frozenset(names)

    def state_dict(self) -> dict[str, Any]:
        """{name: tensor}."""
        return {n: t for n, t in self._model.state_dict().items() if n in self._names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load those tensors."""
        self._model.load_state_dict(state, strict=False)


class OptionalObject(_Wrapper):
    """An object that stays as built where a checkpoint has nothing of it, and else takes the saved state as it is."""

    load_optional = load_replaces = True

    def load_checks(self, state: dict[str, Any]) -> None:
        """The checks of the owner, if it has any, unless `state` is empty."""
        if state:
            super().load_checks(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load `state` into the owner, unless it is empty."""
        if state:
            super().load_state_dict(state)


class InDtypes(_Wrapper):
    """A model whose tensors a checkpoint holds in other dtypes, by name: they are read in those and then cast.

    `store.load({"model": InDtypes.fp32(model)})` reads fp32 weights into a model in bf16.
    """

    def __init__(self, owner: Any, dtypes: Mapping[str, torch.dtype]) -> None:
        super().__init__(owner)
        self._dtypes = dtypes

    @classmethod
    def fp32(cls, owner: Any) -> InDtypes:
        """In fp32 what the owner, a model or a `StageState` of one, stores in bf16."""
        tensors = owner.state_dict().items()
        half = [n for n, t in tensors if getattr(t, "dtype", None) == torch.bfloat16]
        return cls(owner, dict.fromkeys(half, torch.float32))

    def state_dict(self) -> dict[str, Any]:
        """What a load fills: the owner's state, with tensors of these dtypes, which are those of the checkpoint.

        `load_state_dict` casts them to the owner's.
        """
        saved = self._owner.state_dict()
        cast = {n: saved[n].to(dtype) for n, dtype in self._dtypes.items() if n in saved}
        return {**saved, **cast}

    def load_selects(self, saved: list[Path]) -> list[Path]:
        """The saved paths that the owner selects."""
        return list(getattr(self._owner, "load_selects", list)(saved))


def tensor_names(model: nn.Module) -> set[str]:
    """Names of all parameters and buffers."""
    return {name for name, _ in model.named_parameters()} | {n for n, _ in model.named_buffers()}
