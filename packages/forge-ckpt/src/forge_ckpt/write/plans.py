"""Who writes what, in a form that travels: torch's plans and write results as plain JSON values.

A plan's ``planner_data`` is ``{"paths": {name: path}, "ties": {name: the first name of its memory}}``.
"""

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from forge_ckpt import objects, tree
from forge_ckpt.manifest import FileEntry

Key = tuple[str, tuple[int, ...] | None]


def key_of(item: WriteItem) -> Key:
    """Name and offset: the same for two copies of one box."""
    offset = item.index.offset
    return item.index.fqn, None if offset is None else tuple(offset)


def plan_to_json(plan: SavePlan) -> dict[str, Any]:
    """About 150 bytes of JSON for each box, before they are deflated."""
    paths = {name: tree.path_to_json(path) for name, path in plan.planner_data["paths"].items()}
    items = [_item_to_json(item) for item in plan.items]
    return {"items": items, "paths": paths, "ties": plan.planner_data["ties"]}


def plan_from_json(value: dict[str, Any]) -> SavePlan:
    """The plan that :func:`plan_to_json` was given."""
    paths = {name: tree.path_from_json(path) for name, path in value["paths"].items()}
    items = [_item_from_json(*item) for item in value["items"]]
    return SavePlan(items, planner_data={"paths": paths, "ties": value["ties"]})


def write_once(plans: list[SavePlan]) -> list[SavePlan]:
    """Leave each box in one plan: a value in the lowest rank's, a replica where least is planned.

    Tied tensors go together, so that they are stored once.
    """
    holders: dict[Key, list[int]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            holders.setdefault(key_of(item), []).append(rank)
    planned = [0] * len(plans)
    writer: dict[Key, int] = {}
    for plan in plans:
        for item in plan.items:
            name, offset = key = key_of(item)
            if key in writer:
                continue
            tied = writer.get((plan.planner_data["ties"].get(name), offset))
            if item.type == WriteItemType.BYTE_IO:
                writer[key] = holders[key][0]
            elif tied in holders[key]:
                writer[key] = tied
            else:
                writer[key] = min(holders[key], key=planned.__getitem__)
                planned[writer[key]] += item.tensor_storage_size() or 0
    return [
        SavePlan(
            [item for item in plan.items if writer[key_of(item)] == rank],
            planner_data=plan.planner_data,
        )
        for rank, plan in enumerate(plans)
    ]


def results_to_json(results: list[WriteResult]) -> list[list[Any]]:
    """``[name, offset, kind, data]``; 64 bytes a block of 4 MiB are most of it."""
    found: list[list[Any]] = []
    for result in results:
        offset, data = result.index.offset, result.storage_data
        place = None if offset is None else list(offset)
        if isinstance(data, FileEntry):
            found.append([result.index.fqn, place, "file", [data.size, list(data.blocks)]])
        elif isinstance(data, str):
            found.append([result.index.fqn, place, "object", data])
        else:
            found.append([result.index.fqn, place, "tensor", list(data)])
    return found


def results_from_json(values: list[list[Any]]) -> list[WriteResult]:
    """What the writer's ``finish`` takes."""
    found = []
    for name, offset, kind, value in values:
        data = value
        if kind == "file":
            data = FileEntry.of(value[0], tuple(value[1]))
        elif kind == "tensor":
            data = tuple(value)
        index = MetadataIndex(name, None if offset is None else torch.Size(offset))
        found.append(WriteResult(index, 0, data))
    return found


def _item_to_json(item: WriteItem) -> list[Any]:
    if item.type == WriteItemType.BYTE_IO:
        return [item.index.fqn, item.type.name]
    data = item.tensor_data
    assert data is not None
    box = [list(data.chunk.offsets), list(data.chunk.sizes), list(data.size)]
    return [item.index.fqn, item.type.name, *box, objects.dtype_name(data.properties.dtype)]


def _item_from_json(name: str, kind: str, *box: Any) -> WriteItem:
    if not box:
        return WriteItem(MetadataIndex(name), WriteItemType[kind])
    offsets, sizes, shape, dtype = box
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    properties = TensorProperties(dtype=objects.dtype_from_name(dtype))
    data = TensorWriteData(chunk, properties, torch.Size(shape))
    return WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType[kind], tensor_data=data)
