"""The targets of a load: the entries of the caller's state, prepared for the saved names."""

from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
from torch.distributed.tensor import DTensor

from forge_ckpt._shared.problems import invalid
from forge_ckpt.errors import CheckpointMismatch
from forge_ckpt.manifest import Manifest, TensorEntry
from forge_ckpt.protocols import Path, Stateful

#: The target of an object whose ``load_fills`` wants none of the saved paths.
NO_TARGET = object()


def check_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """``state`` as a dict; raises ValueError unless it maps at least one name to an object."""
    if not isinstance(state, Mapping) or not state or not all(type(k) is str and k for k in state):
        rule, fix = "must map at least one name to an object", 'give {"model": model}'
        raise invalid("state", "type", type(state).__name__, rule, fix)
    return dict(state)


def is_stateful(value: Any) -> TypeGuard[Stateful]:
    """Whether it has ``state_dict()`` and ``load_state_dict()``."""
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


def state_of(value: Any) -> Any:
    """The saved form of an entry of the state."""
    return value.state_dict() if is_stateful(value) else value


def load_target(value: Any, name: str, table: Manifest) -> Any:
    """The state that a load fills; None (take the saved state) for objects with ``load_replaces``.

    An object's ``load_fills(paths)`` gets the saved paths below its name and returns the part of its
    state that they can fill; NO_TARGET stands for an empty part. See :mod:`forge_ckpt.protocols`.
    """
    if getattr(value, "load_optional", False) and not _names_below(name, table):
        return NO_TARGET
    if is_stateful(value) and getattr(value, "load_replaces", False):
        return None
    fills = getattr(value, "load_fills", None)
    if callable(fills):
        return fills(list(_names_below(name, table))) or NO_TARGET
    state = state_of(value)
    if isinstance(value, torch.optim.Optimizer):
        return _with_saved_slots(state, value, name, table)
    return state


def check_object(value: Any, name: str, saved: Any) -> None:
    """Raise ValueError for a saved state that ``value`` cannot load, before anything changes.

    An object's ``load_checks(saved)`` decides. For a torch optimizer, the sizes of the groups and the
    parameter names in them are compared here: its load_state_dict would fail after the model changed.
    """
    checks = getattr(value, "load_checks", None)
    if callable(checks):
        checks(saved)
    elif isinstance(value, torch.optim.Optimizer):
        here = [len(group["params"]) for group in value.param_groups]
        try:
            there = [len(group["params"]) for group in saved["param_groups"]]
        except (TypeError, KeyError) as error:
            rule = f"are not those of an optimizer ({error!r:.200})"
            raise invalid("param_groups", "type", ..., rule) from error
        if there != here:
            rule = f"parameters are in the saved groups, and {here} here"
            fix = "build the optimizer over the same parameters as the run that saved it"
            raise invalid(name, "groups", there, rule, fix, kind=CheckpointMismatch)
        _check_names(value, name, saved["param_groups"])


def _check_names(optimizer: torch.optim.Optimizer, name: str, saved: Any) -> None:
    """Compare parameter names: torch restores state by position, so equal sizes do not suffice."""
    for group, saved_group in zip(optimizer.param_groups, saved, strict=True):
        here, there = group.get("param_names"), saved_group.get("param_names")
        if here and there and here != there:
            ours, theirs = next((a, b) for a, b in zip(here, there, strict=True) if a != b)
            rule = f"is the saved parameter of a group that has {ours} here"
            fix = "build the optimizer over the same groups as the run that saved it"
            raise invalid(name, "parameter", theirs, rule, fix, kind=CheckpointMismatch)


def unselected_names(state: Mapping[str, Any], table: Manifest) -> set[str]:
    """Saved names that the ``load_selects(paths)`` of an object of ``state`` does not return.

    The method gets the saved paths below the object's own name and returns those to load.
    """
    unselected: set[str] = set()
    for name, value in state.items():
        select = getattr(value, "load_selects", None)
        if callable(select):
            below = _names_below(name, table)
            selected = set(select(list(below)))
            unselected |= {key for path, key in below.items() if path not in selected}
    return unselected


def _names_below(name: str, table: Manifest) -> dict[Path, str]:
    """{path below ``name``: saved name}."""
    return {path[1:]: key for key, path in table.paths().items() if path[0] == name}


def _with_saved_slots(
    state: dict[str, Any], optimizer: torch.optim.Optimizer, name: str, table: Manifest
) -> dict[str, Any]:
    """A torch optimizer's state, with empty slots for the saved ones that it does not have yet.

    Before its first step it has none, and each rank would load the full tensor of every saved slot. A
    slot of its parameter's shape is sharded like the parameter; others (step counts) are loaded whole.
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
                    empty = _slot_like(parameters[index], table.tensors.get(key))
                    slots.setdefault(index, {})[slot] = empty
            case _:
                pass
    return {**state, "state": {**here, **slots}}


def _slot_like(parameter: torch.Tensor, saved: TensorEntry | None) -> torch.Tensor | None:
    if saved is None or saved.shape != tuple(parameter.shape):
        return None  # the saved value replaces it
    # As torch makes slots. zeros_like of a float8 weight is a plain tensor, empty_like a wrapper.
    return torch.zeros_like(parameter, dtype=saved.dtype, requires_grad=False)
