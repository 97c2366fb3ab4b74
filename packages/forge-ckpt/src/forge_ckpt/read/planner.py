"""torch's load planner with Forge's names, strict comparison and objects as tagged JSON."""

import io
import json
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from forge_ckpt import objects, tree
from forge_ckpt._shared.problems import Problem, Shown
from forge_ckpt.errors import mismatch, one_line
from forge_ckpt.objects import dtype_name
from forge_ckpt.wrapped import layout_problem, unwrap


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
        self._owners: dict[str, tree.Path] = {}  # saved name -> path of the leaf that it replaces

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
        problems: list[Problem] = []
        names_below = _names_by_prefix(self.metadata.planner_data)
        for name, value in self.state_dict.items():
            if isinstance(value, torch.Tensor):
                problems += _tensor_problems(name, value, saved.get(name))
                wanted[name] = value
                continue

            path: tree.Path = self.mappings[name]
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
        self._values[name] = objects.decode(json.loads(value.getvalue()))

    def finish_read(self) -> None:
        """Put the replaced leaves into the caller's state; ForgeReader calls it last."""
        self.replace_leaves(self.original_state_dict)

    def is_replaced(self, read_item: ReadItem) -> bool:
        """Whether it belongs to a replaced leaf, whose memory was made for this load."""
        return read_item.dest_index.fqn in self._owners

    def replace_leaves(self, state: dict[str, Any]) -> dict[str, Any]:
        """Put the replaced leaves into ``state``, which has the caller's structure; returns it."""
        assert self.metadata is not None
        built: dict[tree.Path, Any] = {}
        for name, owner in self._owners.items():
            value = self._values.get(name, self.state_dict[name])
            rest = self.metadata.planner_data[name][len(owner) :]
            built[owner] = tree.set_element(built.get(owner), rest, value)
        for owner, value in built.items():
            tree.set_element(state, owner, value)
        return state


def _names_by_prefix(paths: dict[str, tree.Path]) -> dict[tree.Path, list[str]]:
    """{each prefix of a saved path: names of the saved leaves below it}."""
    names: dict[tree.Path, list[str]] = {}
    for name, path in paths.items():
        for length in range(1, len(path) + 1):
            names.setdefault(path[:length], []).append(name)
    return names


def _empty(saved: Any) -> torch.Tensor | None:
    if isinstance(saved, TensorStorageMetadata):
        return torch.empty(saved.size, dtype=saved.properties.dtype)
    return None


def _tensor_problems(name: str, value: torch.Tensor, saved: Any) -> Iterator[Problem]:
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
