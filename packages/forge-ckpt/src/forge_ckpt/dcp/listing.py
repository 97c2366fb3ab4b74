"""What a DCP directory says it holds: tensors in boxes, objects, and the bytes of each."""

import itertools
import math
import re
from dataclasses import dataclass
from typing import Any

import torch

from forge_ckpt import manifest
from forge_ckpt._shared.file_bytes import read_at
from forge_ckpt._shared.problems import invalid
from forge_ckpt.dcp import unpickle
from forge_ckpt.dcp.unpickle import Record
from forge_ckpt.errors import corrupt, restated
from forge_ckpt.files import Directory

METADATA = ".metadata"
_MAX_METADATA = 2**28  # bytes; torch writes about 160 for each box of each tensor
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}")
DCPPath = tuple[str | int, ...]


@dataclass(frozen=True)
class Payload:
    """Bytes of a file, as ``torch.save`` wrote them."""

    file: str
    start: int
    length: int


@dataclass(frozen=True)
class DCPTensor:
    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...], Payload], ...]  # offsets, sizes, bytes


@dataclass(frozen=True)
class Listing:
    """Tensors, objects and the path of each, by the name in DCP (its fqn)."""

    tensors: dict[str, DCPTensor]
    objects: dict[str, Payload]
    paths: dict[str, DCPPath]


def read_listing(directory: Directory) -> Listing:
    """The listing of an open directory; raises CorruptCheckpoint for one that torch cannot have written."""
    where = directory.path / METADATA
    fd, size = directory.open(METADATA)
    with open(fd, "rb", buffering=0):
        if size > _MAX_METADATA:
            raise corrupt(where, "", size, f"bytes must be at most {_MAX_METADATA}", code="size")
        data = bytearray(size)
        read_at(fd, memoryview(data), 0)
    try:
        return _Reading(directory, unpickle.load(bytes(data))).listing()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise restated(error, f"{where}, of which nothing was run") from error


class _Reading:
    """The fields of the records, each checked for its type where it is used."""

    def __init__(self, directory: Directory, root: Any) -> None:
        self._directory = directory
        self._metadata = _fields(root, "Metadata")
        self._sizes: dict[str, int] = {}
        self._places: dict[tuple[str, tuple[int, ...] | None], Payload] = {}

    def listing(self) -> Listing:
        for index, info in _dict(self._metadata["storage_data"], "storage_data").items():
            key = _fields(index, "MetadataIndex")
            offset = key.get("offset")
            place = (key["fqn"], None if offset is None else _counts(offset, "offset"))
            self._places[place] = self._payload(_fields(info, "_StorageInfo"))

        self._check_payloads()
        found = Listing({}, {}, {})
        paths = self._metadata.get("planner_data")
        for name, entry in _dict(self._metadata["state_dict_metadata"], "names").items():
            if type(name) is not str:
                raise invalid("", "name", type(name).__name__, "is the type of a name, not str")
            path = paths.get(name, (name,)) if type(paths) is dict else (name,)
            if type(path) is not tuple or not path or not all(map(_is_step, path)):
                raise invalid(name[:80], "path", ..., "must have a tuple of keys as its path")
            found.paths[name] = path
            if type(entry) is Record and entry.kind == "BytesStorageMetadata":
                found.objects[name] = self._place(name, None)
            else:
                found.tensors[name] = self._tensor(name, _fields(entry, "TensorStorageMetadata"))
        return found

    def _check_payloads(self) -> None:
        """Each byte is listed once: else a small directory could become an endless checkpoint."""
        ordered = sorted(self._places.values(), key=lambda payload: (payload.file, payload.start))
        for one, two in itertools.pairwise(ordered):
            if one.file == two.file and two.start < one.start + one.length:
                raise invalid(one.file, "overlap", two.start, "is a byte that is listed twice")

    def _tensor(self, name: str, entry: dict[str, Any]) -> DCPTensor:
        properties = _record(entry["properties"], "TensorProperties").fields
        dtype = properties[0] if type(properties) is tuple else properties["dtype"]
        if not isinstance(dtype, torch.dtype):
            raise invalid(name, "dtype", type(dtype).__name__, "must be a dtype")

        shape = _counts(entry["size"], name)
        boxes = []
        for record in entry["chunks"]:
            chunk = _fields(record, "ChunkStorageMetadata")
            offsets, sizes = _counts(chunk["offsets"], name), _counts(chunk["sizes"], name)
            if math.prod(sizes):
                payload = self._place(name, offsets)
                if math.prod(sizes) * dtype.itemsize > payload.length:
                    rule = f"bytes are too few for {sizes} of {dtype}"
                    raise invalid(name, "length", payload.length, rule)
                boxes.append((offsets, sizes, payload))
        manifest.check_tiling(name, shape, [(offsets, sizes) for offsets, sizes, _ in boxes])
        return DCPTensor(shape, dtype, tuple(boxes))

    def _place(self, name: str, offsets: tuple[int, ...] | None) -> Payload:
        if (name, offsets) not in self._places:
            raise invalid(name, "missing", offsets, "is a chunk without bytes")
        return self._places[name, offsets]

    def _payload(self, info: dict[str, Any]) -> Payload:
        name = info["relative_path"]
        if type(name) is not str or not _FILE.fullmatch(name):
            shown = name if type(name) is str else type(name).__name__
            raise invalid("file", "name", shown, "must be a name inside the directory")
        if info.get("transform_descriptors"):
            rule = "holds bytes that an extension transformed"
            raise invalid(name, "transformed", ..., rule, "save without it")
        start, length = _counts((info["offset"], info["length"]), name)
        if name not in self._sizes:
            fd, self._sizes[name] = self._directory.open(name)
            open(fd, "rb", buffering=0).close()
        if start + length > self._sizes[name]:
            rule = f"bytes are fewer than the {start + length} that are listed"
            raise invalid(name, "truncated", self._sizes[name], rule)
        return Payload(name, start, length)


def _is_step(step: Any) -> bool:
    return type(step) is str or (type(step) is int and 0 <= step < 1_000_000)


def _record(value: Any, kind: str) -> Record:
    if type(value) is not Record or value.kind != kind:
        raise invalid(kind, "record", type(value).__name__, "must be a record of this class")
    return value


def _fields(value: Any, kind: str) -> dict[str, Any]:
    return _dict(_record(value, kind).fields, kind)


def _dict(value: Any, name: str) -> dict[Any, Any]:
    if type(value) is not dict:
        raise invalid(name, "dict", type(value).__name__, "must be a dict")
    return value


def _counts(values: Any, name: str) -> tuple[int, ...]:
    if type(values) is not tuple or len(values) > manifest.MAX_DIMS:
        rule = f"must have a tuple of at most {manifest.MAX_DIMS} numbers as shape or place"
        raise invalid(name, "shape", ..., rule)
    if any(type(value) is not int or not 0 <= value < 2**60 for value in values):
        raise invalid(name, "count", ..., "must have integers of 0 or more as sizes and offsets")
    return values
