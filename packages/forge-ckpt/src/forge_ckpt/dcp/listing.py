"""What a DCP directory says it holds: tensors in boxes, objects, and the bytes of each."""

import itertools
import math
import re
from dataclasses import dataclass
from typing import Any

import torch

from forge_ckpt import manifest
from forge_ckpt.dcp import unpickle
from forge_ckpt.dcp.unpickle import Record
from forge_ckpt.errors import CorruptCheckpoint
from forge_ckpt.files import Directory, read_at

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
            raise CorruptCheckpoint(f"{where}: {size} bytes, at most {_MAX_METADATA} are read")
        data = bytearray(size)
        read_at(fd, memoryview(data), 0)
    try:
        return _Reading(directory, unpickle.load(bytes(data))).listing()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpoint(f"{where}: {error!s:.300}; nothing of it was run") from error


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
                raise ValueError("a name that is no string")
            path = paths.get(name, (name,)) if type(paths) is dict else (name,)
            if type(path) is not tuple or not path or not all(map(_is_step, path)):
                raise ValueError(f"{name:.80}: a path that is no tuple of keys")
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
                raise ValueError(f"{one.file}: byte {two.start} is listed twice")

    def _tensor(self, name: str, entry: dict[str, Any]) -> DCPTensor:
        properties = _record(entry["properties"], "TensorProperties").fields
        dtype = properties[0] if type(properties) is tuple else properties["dtype"]
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name}: a dtype that is none")
        shape = _counts(entry["size"], name)
        boxes = []
        for record in entry["chunks"]:
            chunk = _fields(record, "ChunkStorageMetadata")
            offsets, sizes = _counts(chunk["offsets"], name), _counts(chunk["sizes"], name)
            if math.prod(sizes):
                payload = self._place(name, offsets)
                if math.prod(sizes) * dtype.itemsize > payload.length:
                    raise ValueError(f"{name}: {payload.length} bytes for {sizes} of {dtype}")
                boxes.append((offsets, sizes, payload))
        manifest.check_tiling(name, shape, [(offsets, sizes) for offsets, sizes, _ in boxes])
        return DCPTensor(shape, dtype, tuple(boxes))

    def _place(self, name: str, offsets: tuple[int, ...] | None) -> Payload:
        if (name, offsets) not in self._places:
            raise ValueError(f"{name}: no bytes are listed for its part at {offsets}")
        return self._places[name, offsets]

    def _payload(self, info: dict[str, Any]) -> Payload:
        name = info["relative_path"]
        if type(name) is not str or not _FILE.fullmatch(name):
            raise ValueError(f"file {name!r:.80} is not a name inside the directory")
        if info.get("transform_descriptors"):
            raise ValueError(f"{name}: bytes that an extension has transformed; save without it")
        start, length = _counts((info["offset"], info["length"]), name)
        if name not in self._sizes:
            fd, self._sizes[name] = self._directory.open(name)
            open(fd, "rb", buffering=0).close()
        if start + length > self._sizes[name]:
            raise ValueError(
                f"{name}: {self._sizes[name]} bytes, {start + length} are listed (truncated?)"
            )
        return Payload(name, start, length)


def _is_step(step: Any) -> bool:
    return type(step) is str or (type(step) is int and 0 <= step < 1_000_000)


def _record(value: Any, kind: str) -> Record:
    if type(value) is not Record or value.kind != kind:
        raise ValueError(f"a {type(value).__name__} instead of a {kind}")
    return value


def _fields(value: Any, kind: str) -> dict[str, Any]:
    return _dict(_record(value, kind).fields, kind)


def _dict(value: Any, name: str) -> dict[Any, Any]:
    if type(value) is not dict:
        raise ValueError(f"{name} is a {type(value).__name__} instead of a dict")
    return value


def _counts(values: Any, name: str) -> tuple[int, ...]:
    if type(values) is not tuple or len(values) > manifest.MAX_DIMS:
        raise ValueError(f"{name}: a shape or place that is none")
    if any(type(value) is not int or not 0 <= value < 2**60 for value in values):
        raise ValueError(f"{name}: a size or offset that is no count")
    return values
