"""What each rank writes: named leaves, the exchange of proposals, one writer for each box, the layout of a file."""

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from forge_ckpt import codec
from forge_ckpt._shared.problems import ProblemError, invalid, problems_of
from forge_ckpt.codec import dtype_name, layout_problem, unwrap
from forge_ckpt.manifest import ALIGN, FileEntry

Key = tuple[str, tuple[int, ...] | None]
Structure = tuple[list[tuple[Any, ...]], dict[str, str]]
# Torch gives these an itemsize of whole bytes, whatever their width.
_WITHOUT_SIZE = re.compile(r"u?int[1-7]|bits\d.*")


class Proposal(NamedTuple):
    """What a rank could write: boxes and objects, their paths, and ``ties``, {name: the first name of its memory}.

    Ranks exchange its JSON form, ``{"items": [[name, kind], [name, kind, offsets, sizes, shape, dtype], ...], "paths": ...,
    "ties": ...}``: about 150 bytes for each box, before compression.
    """

    items: Sequence[WriteItem]
    paths: Mapping[str, codec.Path]
    ties: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """A JSON value."""
        items: list[list[Any]] = []
        for item in self.items:
            items.append([item.index.fqn, item.type.name])
            if (data := item.tensor_data) is not None:
                dtype = codec.dtype_name(data.properties.dtype)
                items[-1] += [data.chunk.offsets, data.chunk.sizes, data.size, dtype]
        paths = {name: codec.path_to_json(path) for name, path in self.paths.items()}
        return {"items": items, "paths": paths, "ties": self.ties}

    @staticmethod
    def from_json(value: dict[str, Any]) -> "Proposal":
        """The proposal that :meth:`to_json` encoded."""
        items = []
        for name, kind, *box in value["items"]:
            index, data = MetadataIndex(name), None
            if box:
                chunk = ChunkStorageMetadata(torch.Size(box[0]), torch.Size(box[1]))
                properties = TensorProperties(dtype=codec.dtype_from_name(box[3]))
                data = TensorWriteData(chunk, properties, torch.Size(box[2]))
                index = MetadataIndex(name, chunk.offsets)
            items.append(WriteItem(index, WriteItemType[kind], tensor_data=data))
        paths = {name: codec.path_from_json(path) for name, path in value["paths"].items()}
        return Proposal(items, paths, value["ties"])


def key_of(item: WriteItem) -> Key:
    """(name, offset) of a box: equal for the replicas of it that several ranks hold."""
    offset = item.index.offset
    return item.index.fqn, None if offset is None else tuple(offset)


def choose_writers(proposals: Sequence[Proposal]) -> dict[Key, int]:
    """The rank that writes each box: of an object the lowest, of a replica the one with the fewest bytes so far.

    Tied tensors stay on one rank, because a rank stores the memory that they share once. Raises ValueError for a name
    that is of another shape, dtype or kind on another rank: only one of them would be stored.
    """
    holders: dict[Key, list[int]] = {}
    # {name: (what it is, its first rank)}: an error names both ranks.
    found: dict[str, tuple[str, int]] = {}
    for rank, proposal in enumerate(proposals):
        for item in proposal.items:
            described = _described(item)
            there, first = found.setdefault(item.index.fqn, (described, rank))
            if there != described:
                rule = f"is {described} on rank {rank}, and {there} on rank {first}: plain tensors must be replicas"
                fix = "give each rank's own tensor another name, or save one DTensor"
                raise invalid(item.index.fqn, "ranks", ..., rule, fix)
            holders.setdefault(key_of(item), []).append(rank)

    paths = {path: rank for rank, other in enumerate(proposals) for path in other.paths.values()}
    for path, rank in paths.items():
        for above in (path[:length] for length in range(1, len(path)) if path[:length] in paths):
            rule = f"is an object on rank {paths[above]}, and holds tensors on rank {rank}"
            fix = "save the same structure on all ranks"
            raise invalid(codec.dotted_name(above), "ranks", ..., rule, fix)

    planned_bytes = [0] * len(proposals)
    writer: dict[Key, int] = {}
    for proposal in proposals:
        for item in proposal.items:
            name, offset = key = key_of(item)
            if key in writer:
                continue
            # The rank that writes the first name of this memory, if it is planned already: so it is stored only once.
            tied = writer.get((proposal.ties.get(name, ""), offset))
            if item.type == WriteItemType.BYTE_IO:
                writer[key] = holders[key][0]
            elif tied in holders[key]:
                writer[key] = tied
            else:
                writer[key] = min(holders[key], key=planned_bytes.__getitem__)
                planned_bytes[writer[key]] += item.tensor_storage_size() or 0
    return writer


class ForgeSavePlanner(DefaultSavePlanner):
    """For ``dcp.save(state, storage_writer=ForgeWriter(path), planner=ForgeSavePlanner())``.

    Leaves are named by :func:`forge_ckpt.codec.flatten`. Objects are encoded while planning, so an
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
        leaves, self.mappings = codec.flatten(state_dict, saving=True)  # type: ignore[assignment]
        self.state_dict = {name: _leaf(name, value) for name, value in leaves.items()}
        self.ties = _ties(self.state_dict)
        self.is_coordinator = is_coordinator

    def structure(self) -> Structure:
        """All that the plan depends on; for equal structures :meth:`create_local_plan` returns equal plans."""
        kinds = [
            (name, self.mappings[name], _kind(value)) for name, value in self.state_dict.items()
        ]
        return kinds, self.ties

    def propose(self) -> Proposal:
        """What this rank could write."""
        self.plan = super().create_local_plan()
        return Proposal(self.plan.items, self.mappings, self.ties)

    def create_local_plan(self) -> SavePlan:
        """This rank's proposal, as torch's plan; its ``planner_data`` are the paths and the ties."""
        proposal = self.propose()
        self.plan = SavePlan(self.plan.items, planner_data=proposal[1:])
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Plans in which each box occurs once, and the metadata of all boxes."""
        proposals = [Proposal(plan.items, *plan.planner_data) for plan in all_plans]
        return self.assign(proposals, choose_writers(proposals))

    def assign(
        self, proposals: Sequence[Proposal], writers: Mapping[Key, int]
    ) -> tuple[list[SavePlan], Metadata]:
        """The plan of each rank and the metadata of all boxes, where ``writers`` write them."""
        plans = [
            SavePlan([i for i in items if writers[key_of(i)] == rank], planner_data=paths)
            for rank, (items, paths, _) in enumerate(proposals)
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
    """A tensor that can be saved, or the JSON of an object; raises ValueError for any other value."""
    if not isinstance(value, torch.Tensor):
        try:
            return codec.dumps(codec.encode(value, name))
        except RecursionError:
            raise codec.too_deep(name) from None
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
    if _WITHOUT_SIZE.fullmatch(codec.dtype_name(value.dtype)):
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


def _described(item: WriteItem) -> str:
    """What must be the same on all ranks that have the name."""
    data = item.tensor_data
    if data is None:
        return "an object"
    kind = "a plain" if item.type == WriteItemType.TENSOR else "a sharded"
    return f"{kind} tensor of {tuple(data.size)} {dtype_name(data.properties.dtype)}"


def results_to_json(results: list[WriteResult]) -> list[list[Any]]:
    """``[name, offset, data]`` for each result; mostly digests, 64 bytes for each block of 4 MiB."""
    data = (r.storage_data for r in results)
    shown = (vars(value) if isinstance(value, FileEntry) else value for value in data)
    return [[r.index.fqn, r.index.offset, value] for r, value in zip(results, shown)]


def results_from_json(values: list[list[Any]]) -> list[WriteResult]:
    """The results that :func:`results_to_json` encoded, as ``ForgeWriter.finish`` takes them."""
    results = []
    for name, offset, data in values:
        if isinstance(data, dict):
            data = FileEntry(data["size"], data["root"], tuple(data["blocks"]))
        elif not isinstance(data, str):
            data = tuple(data)
        index = MetadataIndex(name, None if offset is None else torch.Size(offset))
        results.append(WriteResult(index, 0, data))
    return results


@dataclass(frozen=True)
class Piece:
    """A tensor of this rank, on any device and with any strides, and its place in the file."""

    tensor: torch.Tensor
    start: int

    @property
    def nbytes(self) -> int:
        """Bytes of its elements, row-major."""
        return self.tensor.numel() * self.tensor.element_size()


@dataclass(frozen=True)
class FileLayout:
    """The pieces of one file in the order of their bytes, and the write results of all items of the plan."""

    file: str
    size: int
    pieces: tuple[Piece, ...]
    results: list[WriteResult]


def lay_out(plan: SavePlan, planner: SavePlanner, file: str) -> FileLayout:
    """Lay out the items of ``plan`` in the file of that name; nothing is copied. Objects go into the results.

    Tensors that share memory with the same layout, such as tied weights, are one piece.
    """
    pieces: list[Piece] = []
    results: list[WriteResult] = []
    # The pieces hold the tensors: if one were freed, the next could get its address and be taken for it.
    placed: dict[tuple[Any, ...], Piece] = {}
    size = 0
    for item in plan.items:
        data = planner.resolve_data(item)
        if item.type == WriteItemType.BYTE_IO:
            text = data.getvalue().decode()  # type: ignore[union-attr]
            results.append(WriteResult(item.index, len(text), text))
            continue

        assert isinstance(data, torch.Tensor)
        key = memory_of(data)
        if key not in placed or data.numel() == 0:
            placed[key] = Piece(data.detach(), -(-size // ALIGN) * ALIGN)
            pieces.append(placed[key])
            size = placed[key].start + placed[key].nbytes
        piece = placed[key]
        results.append(WriteResult(item.index, piece.nbytes, (file, piece.start, piece.nbytes)))
    return FileLayout(file, size, tuple(pieces), results)
