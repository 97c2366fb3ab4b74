"""torch's load planner with our names, strict comparison and objects as tagged JSON."""

import io
import json
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from forge_ckpt import objects, tree
from forge_ckpt.errors import CheckpointMismatch
from forge_ckpt.objects import dtype_name
from forge_ckpt.wrapped import plain

_SHOWN = 8


class ForgeLoadPlanner(DefaultLoadPlanner):
    """For ``dcp.load(state, storage_reader=ForgeReader(path), planner=ForgeLoadPlanner())``.

    Tensors in ``state`` are filled in place. Every other leaf is *replaced* by what was saved at
    its place, tensors below it included (they arrive on the CPU): so an optimizer that has no state
    yet gets it. Below the top-level names of ``state`` nothing may be missing, left over, or of
    another shape or dtype: CheckpointMismatch lists the differences before anything is touched.
    Other top-level names of the checkpoint are not read.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=True, flatten_sharded_tensors=False)
        self._values: dict[str, Any] = {}
        self._owners: dict[str, tree.Path] = {}  # saved name -> the leaf it belongs to

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Name the leaves of ``state_dict``."""
        self.original_state_dict = state_dict
        leaves, self.mappings = tree.flatten(state_dict)  # type: ignore[assignment]
        self.state_dict = leaves
        self.metadata = metadata
        self.is_coordinator = is_coordinator
        self._values, self._owners = {}, {}

    def create_local_plan(self) -> LoadPlan:
        """Compare names, shapes and dtypes, then let torch plan the boxes."""
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata
        wanted: dict[str, Any] = {}
        problems: list[str] = []
        below = _by_prefix(self.metadata.planner_data)
        for name, value in self.state_dict.items():
            if isinstance(value, torch.Tensor):
                problems += _tensor_problems(name, value, saved.get(name))
                wanted[name] = value
                continue
            path: tree.Path = self.mappings[name]
            inside = below.get(path, [])
            if not inside:
                problems.append(f"{name}: not in the checkpoint")
            for found in inside:
                self._owners[found] = path
                wanted[found] = _empty(saved[found])
        asked = {str(key) for key in self.original_state_dict}
        for name, path in self.metadata.planner_data.items():
            if name not in wanted and path[0] in asked:
                problems.append(f"{name}: in the checkpoint only")
        if problems:
            raise CheckpointMismatch(_explain(problems))
        self.state_dict = wanted
        return create_default_local_load_plan(wanted, self.metadata)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The memory to fill, of what a wrapper subclass holds."""
        return plain(super().lookup_tensor(index))

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Decode an object; it reaches the caller's state in :meth:`finish_read`."""
        name = read_item.dest_index.fqn
        self._values[name] = objects.decode(json.loads(value.getvalue()))

    def finish_read(self) -> None:
        """Put the replaced leaves into the caller's state; ForgeReader calls it last."""
        self.place_into(self.original_state_dict)

    def is_new(self, read_item: ReadItem) -> bool:
        """Whether it fills memory made for this load, and none of the caller's."""
        return read_item.dest_index.fqn in self._owners

    def place_into(self, state: dict[str, Any]) -> dict[str, Any]:
        """Put the replaced leaves into ``state``, of the caller's structure; returns it."""
        assert self.metadata is not None
        built: dict[tree.Path, Any] = {}
        for name, owner in self._owners.items():
            value = self._values.get(name, self.state_dict[name])
            rest = self.metadata.planner_data[name][len(owner) :]
            built[owner] = tree.place(built.get(owner), rest, value)
        for owner, value in built.items():
            tree.place(state, owner, value)
        return state


def _by_prefix(paths: dict[str, tree.Path]) -> dict[tree.Path, list[str]]:
    below: dict[tree.Path, list[str]] = {}
    for name, path in paths.items():
        for length in range(1, len(path) + 1):
            below.setdefault(path[:length], []).append(name)
    return below


def _empty(saved: Any) -> torch.Tensor | None:
    if isinstance(saved, TensorStorageMetadata):
        return torch.empty(saved.size, dtype=saved.properties.dtype)
    return None


def _tensor_problems(name: str, value: torch.Tensor, saved: Any) -> list[str]:
    here = f"{tuple(value.shape)} {dtype_name(value.dtype)}"
    if value.device.type == "meta":
        return [f"{name}: {here} on the meta device here; materialise it (to_empty) before loading"]
    if saved is None:
        return [f"{name}: not in the checkpoint, here {here}"]
    if not isinstance(saved, TensorStorageMetadata):
        return [f"{name}: saved an object, here {here}"]
    there = f"{tuple(saved.size)} {dtype_name(saved.properties.dtype)}"
    return [] if here == there else [f"{name}: saved {there}, here {here}"]


def _explain(problems: list[str]) -> str:
    more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return (
        "the checkpoint is of another state; build the same model and optimizer as the run that "
        "saved it, or ask only for the names that fit\n  " + "\n  ".join(problems[:_SHOWN]) + more
    )
