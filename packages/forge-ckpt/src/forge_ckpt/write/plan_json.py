"""torch's save plans and write results as plain JSON values, so that ranks can exchange them.

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


def plan_to_json(plan: SavePlan) -> dict[str, Any]:
    """A plan as a JSON value; about 150 bytes for each box, before compression."""
    paths = {name: tree.path_to_json(path) for name, path in plan.planner_data["paths"].items()}
    items = [_item_to_json(item) for item in plan.items]
    return {"items": items, "paths": paths, "ties": plan.planner_data["ties"]}


def plan_from_json(value: dict[str, Any]) -> SavePlan:
    """The plan that :func:`plan_to_json` encoded."""
    paths = {name: tree.path_from_json(path) for name, path in value["paths"].items()}
    items = [_item_from_json(*item) for item in value["items"]]
    return SavePlan(items, planner_data={"paths": paths, "ties": value["ties"]})


def results_to_json(results: list[WriteResult]) -> list[list[Any]]:
    """``[name, offset, kind, data]`` for each result; mostly digests, 64 bytes for each block of 4 MiB."""
    encoded: list[list[Any]] = []
    for result in results:
        data = result.storage_data
        offset = None if result.index.offset is None else list(result.index.offset)
        if isinstance(data, FileEntry):
            encoded.append([result.index.fqn, offset, "file", [data.size, data.root, data.blocks]])
        elif isinstance(data, str):
            encoded.append([result.index.fqn, offset, "object", data])
        else:
            encoded.append([result.index.fqn, offset, "tensor", list(data)])
    return encoded


def results_from_json(values: list[list[Any]]) -> list[WriteResult]:
    """The results that :func:`results_to_json` encoded, as ``ForgeWriter.finish`` takes them."""
    results = []
    for name, offset, kind, value in values:
        data = value
        if kind == "file":
            size, root, blocks = value
            data = FileEntry(size, root, tuple(blocks))
        elif kind == "tensor":
            data = tuple(value)
        index = MetadataIndex(name, None if offset is None else torch.Size(offset))
        results.append(WriteResult(index, 0, data))
    return results


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
