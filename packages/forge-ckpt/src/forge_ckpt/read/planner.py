"""What a load fills: the entries of the caller's state, compared strictly with the saved names."""

import io
import json
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.tensor import DTensor

from forge_ckpt import codec
from forge_ckpt._shared.problems import Problem, Shown, invalid
from forge_ckpt.codec import dtype_name, layout_problem, unwrap
from forge_ckpt.errors import CheckpointMismatch, mismatch, one_line
from forge_ckpt.manifest import Manifest, TensorEntry
from forge_ckpt.protocols import Stateful


class ForgeLoadPlanner(DefaultLoadPlanner):
    """For ``dcp.load(state, storage_reader=ForgeReader(path), planner=ForgeLoadPlanner())``.

    Tensors in ``state`` are filled in place. Every other leaf is *replaced* by the saved subtree of
    the same path, with its tensors (on the CPU): so an optimizer without state gets its state. Below
    the top-level names of ``state`` no entry may be missing, extra, or of another shape or dtype:
    CheckpointMismatch lists the differences before anything changes. Other top-level names of the
    checkpoint are not read.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=True, flatten_sharded_tensors=False)
        self._values: dict[str, Any] = {}
        # Saved name -> path of the leaf that it replaces: one leaf may be rebuilt from several names.
        self._owners: dict[str, codec.Path] = {}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Name the leaves of ``state_dict``."""
        self.original_state_dict = state_dict
        leaves, self.mappings = codec.flatten(state_dict)  # type: ignore[assignment]
        self.state_dict = leaves
        self.metadata = metadata
        self.is_coordinator = is_coordinator
        self._values, self._owners = {}, {}

    def create_local_plan(self) -> LoadPlan:
        """Compare names, shapes and dtypes, then let torch plan the boxes."""
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata
        wanted: dict[str, Any] = {}
        problems: list[Problem] = []
        names_below = _names_by_prefix(self.metadata.planner_data)
        for name, value in self.state_dict.items():
            if isinstance(value, torch.Tensor):
                problems += _tensor_problems(name, value, saved.get(name))
                wanted[name] = value
                continue

            path: codec.Path = self.mappings[name]
            saved_names = names_below.get(path, [])
            if not saved_names:
                problems.append(Problem(one_line(name), "missing", ..., "is not in the checkpoint"))
            for saved_name in saved_names:
                self._owners[saved_name] = path
                wanted[saved_name] = _empty(saved[saved_name])

        top_level = {str(key) for key in self.original_state_dict}
        for name, path in self.metadata.planner_data.items():
            if name not in wanted and path[0] in top_level:
                problems.append(Problem(one_line(name), "extra", ..., "is in the checkpoint only"))
        if problems:
            fix = "build the same model and optimizer as the run that saved it, or ask only for the names that fit"
            header = Problem("", "state", ..., "the checkpoint is of another state", fix)
            raise mismatch(header, problems)
        self.state_dict = wanted
        return create_default_local_load_plan(wanted, self.metadata)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The tensor to fill; of a wrapper subclass, the tensor inside."""
        return unwrap(super().lookup_tensor(index))

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Decode an object; :meth:`finish_read` puts it into the caller's state."""
        name = read_item.dest_index.fqn
        self._values[name] = codec.decode(json.loads(value.getvalue()))

    def finish_read(self) -> None:
        """Put the replaced leaves into the caller's state; ForgeReader calls it last."""
        self.replace_leaves(self.original_state_dict)

    def is_replaced(self, read_item: ReadItem) -> bool:
        """Whether it belongs to a replaced leaf, whose memory was made for this load."""
        return read_item.dest_index.fqn in self._owners

    def replace_leaves(self, state: dict[str, Any]) -> dict[str, Any]:
        """Put the replaced leaves into ``state``, which has the caller's structure; returns it."""
        assert self.metadata is not None
        built: dict[codec.Path, Any] = {}
        for name, owner in self._owners.items():
            value = self._values.get(name, self.state_dict[name])
            rest = self.metadata.planner_data[name][len(owner) :]
            built[owner] = codec.set_element(built.get(owner), rest, value)
        for owner, value in built.items():
            codec.set_element(state, owner, value)
        return state


def _names_by_prefix(paths: dict[str, codec.Path]) -> dict[codec.Path, list[str]]:
    """{each prefix of a saved path: names of the saved leaves below it}."""
    names: dict[codec.Path, list[str]] = {}
    for name, path in paths.items():
        for length in range(1, len(path) + 1):
            names.setdefault(path[:length], []).append(name)
    return names


def _empty(saved: Any) -> torch.Tensor | None:
    """Memory for a saved tensor; None for an object."""
    is_tensor = isinstance(saved, TensorStorageMetadata)
    return torch.empty(saved.size, dtype=saved.properties.dtype) if is_tensor else None


def _tensor_problems(name: str, value: torch.Tensor, saved: Any) -> Iterator[Problem]:
    """Why a saved tensor, or an object, cannot fill ``value``."""
    key = one_line(name)
    if problem := layout_problem(key, value):
        yield problem
        return

    shape, dtype = tuple(value.shape), value.dtype
    here = f"{shape} {dtype_name(dtype)}"
    if value.device.type == "meta":
        rule, fix = f"is {here} on the meta device", "materialize it (to_empty) before loading"
        yield Problem(key, "meta", ..., rule, fix)
    elif saved is None:
        yield Problem(key, "not_saved", ..., f"is {here} here, and not in the checkpoint")
    elif not isinstance(saved, TensorStorageMetadata):
        yield Problem(key, "object", ..., f"is {here} here, and an object in the checkpoint")
    elif (tuple(saved.size), saved.properties.dtype) != (shape, dtype):
        there = f"{tuple(saved.size)} {dtype_name(saved.properties.dtype)}"
        yield Problem(key, "mismatch", Shown(here), f"is here what was saved as {there}")


#: The target of an object whose ``load_fills`` wants none of the saved paths; None is a name not asked for.
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
    if getattr(value, "load_optional", False) and not table.below(name):
        return NO_TARGET
    if is_stateful(value) and getattr(value, "load_replaces", False):
        return None
    fills = getattr(value, "load_fills", None)
    if callable(fills):
        return fills(list(table.below(name))) or NO_TARGET
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
            below = table.below(name)
            selected = set(select(list(below)))
            unselected |= {key for path, key in below.items() if path not in selected}
    return unselected


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
    """Memory for the slot of an optimizer, sharded like its parameter; None to take the saved value."""
    if saved is None or saved.shape != tuple(parameter.shape):
        return None  # cannot be filled in place, so the saved value replaces it
    # As torch makes slots. zeros_like of a float8 weight is a plain tensor, empty_like a wrapper.
    return torch.zeros_like(parameter, dtype=saved.dtype, requires_grad=False)
