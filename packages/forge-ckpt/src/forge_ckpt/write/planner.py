"""torch's save planner with objects as tagged JSON instead of pickles."""

import dataclasses
import io
import re
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from forge_ckpt import objects, tree
from forge_ckpt._shared.problems import ProblemError, invalid, problems_of
from forge_ckpt.wrapped import layout_problem, unwrap
from forge_ckpt.write.deduplicate import deduplicate_plans

Structure = tuple[list[tuple[Any, ...]], dict[str, str]]
# Torch gives these an itemsize of whole bytes, whatever their width.
_WITHOUT_SIZE = re.compile(r"u?int[1-7]|bits\d.*")


class ForgeSavePlanner(DefaultSavePlanner):
    """For ``dcp.save(state, storage_writer=ForgeWriter(path), planner=ForgeSavePlanner())``.

    Leaves are named by :func:`forge_ckpt.tree.flatten`. Objects are encoded while planning, so an
    object that cannot be stored raises ValueError with its name and type before anything is written.
    Replicated entries are written once: an object by the lowest rank, tensors spread by their bytes.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=True, flatten_sharded_tensors=False)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Name, check and encode the leaves of ``state_dict``."""
        leaves, self.mappings = tree.flatten(state_dict, saving=True)  # type: ignore[assignment]
        self.state_dict = {name: _leaf(name, value) for name, value in leaves.items()}
        self.ties = _ties(self.state_dict)
        self.is_coordinator = is_coordinator

    def structure(self) -> Structure:
        """All that the plan depends on; for equal structures :meth:`create_local_plan` returns equal plans."""
        kinds = [
            (name, self.mappings[name], _kind(value)) for name, value in self.state_dict.items()
        ]
        return kinds, self.ties

    def create_local_plan(self) -> SavePlan:
        """This rank's boxes, and the names that share memory (``ties``)."""
        plan = super().create_local_plan()
        data = {"paths": self.mappings, "ties": self.ties}
        self.plan = dataclasses.replace(plan, planner_data=data)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Plans in which each box occurs once, and the metadata of all boxes."""
        plans = [
            dataclasses.replace(plan, planner_data=plan.planner_data["paths"])
            for plan in deduplicate_plans(all_plans)
        ]
        return super().create_global_plan(plans)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The encoded object, or the plain tensor with this rank's bytes, at ``index``."""
        found = self.state_dict[index.fqn]
        return unwrap(found.detach()) if isinstance(found, torch.Tensor) else found

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """A tensor as it is, an object as the bytes of its JSON."""
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(object.encode())
        return object


def _leaf(name: str, value: Any) -> torch.Tensor | str:
    if not isinstance(value, torch.Tensor):
        try:
            return objects.dumps(objects.encode(value, name))
        except RecursionError:
            raise tree.too_deep(name) from None
    if problem := layout_problem(name, value):
        raise ProblemError([problem])
    if isinstance(value, DTensor) and any(part.is_partial() for part in value.placements):
        rule = "are the placements of a DTensor, whose partial sum has no bytes of its own"
        raise invalid(name, "partial", value.placements, rule, "redistribute it first")

    try:
        unwrap(value)
    except ValueError as error:
        raise ProblemError([problem.under(name) for problem in problems_of(error)]) from None
    if value.device.type == "meta" or value.is_quantized:
        rule = f"is the layout of a tensor of {value.dtype} on {value.device}, and must be dense with memory"
        raise invalid(name, "dense", value.layout, rule, "materialize or densify it")
    if _WITHOUT_SIZE.fullmatch(objects.dtype_name(value.dtype)):
        rule = "has elements of a size that torch does not report"
        raise invalid(name, "dtype", value.dtype, rule, "save a view of it as uint8")
    return value


def _kind(value: torch.Tensor | str) -> tuple[Any, ...] | None:
    """What a leaf's boxes depend on; None for an object, whose value does not matter."""
    if isinstance(value, str):
        return None
    layout = (value.placements, value.device_mesh) if isinstance(value, DTensor) else None
    return type(value), value.dtype, tuple(value.shape), layout


def memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """A key that is equal for two tensors which read the same bytes with the same layout."""
    layout = (tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())
    return (tensor.device, tensor.data_ptr(), *layout)


def _ties(leaves: dict[str, Any]) -> dict[str, str]:
    """{name: the first name whose tensor has the same memory}, of all but first names."""
    first: dict[tuple[Any, ...], str] = {}
    ties: dict[str, str] = {}
    for name, value in leaves.items():
        if isinstance(value, torch.Tensor):
            value = value.detach()
            local = unwrap(value)
            if local.numel() and first.setdefault(memory_of(local), name) != name:
                ties[name] = first[memory_of(local)]
    return ties
