"""What a load fills: the state that is here, with a place for everything that was saved."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from forge_ckpt.errors import CheckpointMismatch
from forge_ckpt.manifest import Manifest, TensorEntry

#: A target that nothing that was saved can fill.
NOTHING = object()


def named(state: Mapping[str, Any]) -> dict[str, Any]:
    """``state`` as a dict; raises ValueError unless it maps at least one name to something."""
    if not isinstance(state, Mapping) or not state or not all(type(k) is str and k for k in state):
        raise ValueError(
            f"state of type {type(state).__name__} must map at least one name to an object, such as "
            '{"model": model}'
        )
    return dict(state)


def is_stateful(value: Any) -> bool:
    """Whether it has ``state_dict()`` and ``load_state_dict()``."""
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


def state_of(value: Any) -> Any:
    """What is saved of an entry of the state."""
    return value.state_dict() if is_stateful(value) else value


def target_of(value: Any, name: str, table: Manifest) -> Any:
    """What a load fills: None (take it as saved) for objects that set ``load_replaces``.

    An object's own ``load_fills(paths)`` gets the saved paths below its name and returns as much of its state
    as these can fill; NOTHING stands for an empty one.
    """
    if is_stateful(value) and getattr(value, "load_replaces", False):
        return None
    fills = getattr(value, "load_fills", None)
    if callable(fills):
        return fills(list(_below(name, table))) or NOTHING
    state = state_of(value)
    if isinstance(value, torch.optim.Optimizer):
        return _with_slots(state, value, name, table)
    return state


def check_object(value: Any, name: str, saved: Any) -> None:
    """Refuse what ``value`` cannot load, before anything changes.

    An object's own ``load_checks(saved)`` says so by a ValueError. A torch optimizer is asked for
    the sizes of its groups and, where they have some, the names in them: its load_state_dict would compare them after the model was loaded.
    """
    checks = getattr(value, "load_checks", None)
    if callable(checks):
        checks(saved)
    elif isinstance(value, torch.optim.Optimizer):
        here = [len(group["params"]) for group in value.param_groups]
        try:
            there = [len(group["params"]) for group in saved["param_groups"]]
        except (TypeError, KeyError) as error:
            raise ValueError(f"param_groups are not those of an optimizer ({error!r})") from error
        if there != here:
            raise CheckpointMismatch(
                f"{name}: saved groups of {there} parameters, here {here}; build the optimizer over "
                "the same parameters as the run that saved it"
            )
        _check_names(value, name, saved["param_groups"])


def _check_names(optimizer: torch.optim.Optimizer, name: str, saved: Any) -> None:
    """State by position goes to the wrong parameters where groups of the same sizes hold others."""
    for group, there in zip(optimizer.param_groups, saved, strict=True):
        mine, its = group.get("param_names"), there.get("param_names")
        if mine and its and mine != its:
            first, other = next((a, b) for a, b in zip(mine, its, strict=True) if a != b)
            raise CheckpointMismatch(
                f"{name}: saved a group with {other} where it is {first} here; build the optimizer over "
                "the same groups as the run that saved it"
            )


def not_asked(state: Mapping[str, Any], table: Manifest) -> set[str]:
    """Saved names that an object of ``state`` does not want, by its ``load_selects(paths)``.

    The method gets the saved paths below the object's own name and returns those to load.
    """
    left: set[str] = set()
    for name, value in state.items():
        select = getattr(value, "load_selects", None)
        if callable(select):
            below = _below(name, table)
            kept = set(select(list(below)))
            left |= {key for path, key in below.items() if path not in kept}
    return left


def _below(name: str, table: Manifest) -> dict[Any, str]:
    """{path below ``name``: saved name}."""
    return {path[1:]: key for key, path in table.paths().items() if path[0] == name}


def _with_slots(
    state: dict[str, Any], optimizer: torch.optim.Optimizer, name: str, table: Manifest
) -> dict[str, Any]:
    """A torch optimizer's state with the slots that were saved and that it does not have yet.

    Before its first step it has none, and a saved slot would come whole to every rank. A slot of
    its parameter's shape is laid out like the parameter; other tensors (step counts) come whole.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(isinstance(parameter, DTensor) for parameter in parameters):
        return state
    here = state["state"]
    slots: dict[int, dict[str, Any]] = {}
    for key, path in table.paths().items():
        match path:
            case (first, "state", int(index), str(slot)) if first == name and index not in here:
                if index < len(parameters):
                    place = _like(parameters[index], table.tensors.get(key))
                    slots.setdefault(index, {})[slot] = place
            case _:
                pass
    return {**state, "state": {**here, **slots}}


def _like(parameter: torch.Tensor, saved: TensorEntry | None) -> torch.Tensor | None:
    if saved is None or saved.shape != tuple(parameter.shape):
        return None  # taken as it was saved
    # as torch makes slots: float8 weights give a plain tensor here, and a wrapper to empty_like
    return torch.zeros_like(parameter, dtype=saved.dtype, requires_grad=False)
