"""A checkpoint that ``dcp.save`` wrote, rewritten as one of a store, tensor by tensor.

Its listing has tensors in boxes, objects, and the bytes of each. Payloads are archives of ``torch.save``, loaded with
``weights_only`` and then checked.
"""

import io
import itertools
import math
import os
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from forge_ckpt import codec, manifest
from forge_ckpt._shared.file_bytes import read_at
from forge_ckpt._shared.problems import ProblemError, invalid, problems_of
from forge_ckpt.dcp import unpickle
from forge_ckpt.dcp.unpickle import Record
from forge_ckpt.errors import corrupt, restated
from forge_ckpt.files import Directory
from forge_ckpt.manifest import ObjectEntry
from forge_ckpt.write.writer import Box, write_checkpoint

METADATA = ".metadata"
_MAX_METADATA_BYTES = 2**28  # bounds the memory: torch writes about 160 for each box of each tensor
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
    # (offsets, sizes, bytes) of each: a sharded tensor has several, because each rank writes its own shard.
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...], Payload], ...]


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
        if size > _MAX_METADATA_BYTES:
            raise corrupt(
                where, "", size, f"bytes must be at most {_MAX_METADATA_BYTES}", code="size"
            )
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
        """The bytes of a box, or of an object without ``offsets``; raises ValueError if none are listed."""
        if (name, offsets) not in self._places:
            raise invalid(name, "missing", offsets, "is a chunk without bytes")
        return self._places[name, offsets]

    def _payload(self, info: dict[str, Any]) -> Payload:
        """The bytes that a ``_StorageInfo`` lists, which must be in a file of the directory."""
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
    """Whether it can be an element of a path in DCP."""
    return type(step) is str or (type(step) is int and 0 <= step < 1_000_000)


def _record(value: Any, kind: str) -> Record:
    """``value`` if it is a record of the class ``kind``, else ValueError."""
    if type(value) is not Record or value.kind != kind:
        raise invalid(kind, "record", type(value).__name__, "must be a record of this class")
    return value


def _fields(value: Any, kind: str) -> dict[str, Any]:
    """The fields of a record of the class ``kind``, by name."""
    return _dict(_record(value, kind).fields, kind)


def _dict(value: Any, name: str) -> dict[Any, Any]:
    if type(value) is not dict:
        raise invalid(name, "dict", type(value).__name__, "must be a dict")
    return value


def _counts(values: Any, name: str) -> tuple[int, ...]:
    """``values`` if it is a tuple of numbers of 0 or more, as a shape, else ValueError."""
    if type(values) is not tuple or len(values) > manifest.MAX_DIMS:
        rule = f"must have a tuple of at most {manifest.MAX_DIMS} numbers as shape or place"
        raise invalid(name, "shape", ..., rule)
    if any(type(value) is not int or not 0 <= value < 2**60 for value in values):
        raise invalid(name, "count", ..., "must have integers of 0 or more as sizes and offsets")
    return values


# Bounds of an object: a small archive must not become endless JSON, and Python recurses about 1000 deep.
_VALUES_PER_BYTE = 64
_MAX_DEPTH = 100


def load_tensor(
    directory: Directory, payload: Payload, name: str, sizes: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """The dense CPU tensor of a payload; raises CorruptCheckpoint unless it has ``sizes`` and ``dtype``."""
    value, records = _load(directory, payload, name)
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_meta:
        raise corrupt("", name, type(value).__name__, "must be a dense tensor", code="type")
    if (found := (tuple(value.shape), value.dtype)) != (sizes, dtype):
        raise corrupt("", name, found, f"must be {sizes} {dtype}, as listed", code="mismatch")
    _check_storage(value, records, name)
    return value.detach()


def load_object(directory: Directory, payload: Payload, name: str) -> Any:
    """The value of a payload: containers, strings, numbers, tensors; no larger than its bytes allow."""
    value, records = _load(directory, payload, name)
    budget, todo = _VALUES_PER_BYTE * payload.length, [(value, 0)]
    # Lists that hold each other many times over are small in a pickle and endless in JSON.
    while todo:
        item, depth = todo.pop()
        budget -= 1
        children: list[Any] = []
        if isinstance(item, str | bytes):
            budget -= len(item)
        elif isinstance(item, dict):
            children = [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset):
            children = [*item]
        elif isinstance(item, Tensor):
            _check_storage(item, records, name)
            budget -= item.numel() * item.element_size()

        if budget < 0 or depth > _MAX_DEPTH:
            raise corrupt("", name, ..., "is deeper or larger than its bytes allow", code="expands")
        todo += [(child, depth + 1) for child in children]
    return value


def _load(directory: Directory, payload: Payload, name: str) -> tuple[Any, set[int]]:
    """The value and the sizes of the tensors' records in the archive."""
    where = f"{directory.path / payload.file} at byte {payload.start}"
    fd, _ = directory.open(payload.file)
    with open(fd, "rb", buffering=0):
        view = io.BufferedReader(_Slice(fd, payload))
        try:
            records = _check_archive(view, payload.length, name)
            view.seek(0)
            return torch.load(view, map_location="cpu", weights_only=True), records

        except (OSError, MemoryError):
            raise
        except ProblemError as error:
            raise restated(error, where) from None
        except Exception as error:  # torch.load raises nearly every class for damaged bytes
            found = re.search(r"Unsupported .*|GLOBAL \S+", str(error))
            if found:
                shown = found[0].partition(". ")[0][:120]
                rule = "needs more than plain values, and nothing is unpickled"
                fix = f"leave it out with --without '{name}'"
                raise invalid(name, "pickle", shown, rule, fix, where=where) from None

            text = str(error).partition("\n")[0]
            rule = f"is not an archive of torch.save ({type(error).__name__}: {text:.200})"
            raise corrupt(where, name, ..., rule, code="damaged") from None


def _check_archive(view: IO[bytes], length: int, name: str) -> set[int]:
    """Refuse an archive that torch.save does not write and torch.load would read: compressed, or big-endian."""
    with zipfile.ZipFile(view) as archive:
        entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise invalid(name, "compressed", ..., "has compressed records")
        if sum(entry.file_size for entry in entries) > length:
            raise invalid(name, "larger", ..., "has records that are larger than the payload")
        orders = [e for e in entries if e.filename.endswith("/byteorder")]
        if any(archive.read(entry) != b"little" for entry in orders):
            raise invalid(name, "byte_order", ..., "has numbers that are not little-endian")
    return {entry.file_size for entry in entries if "/data/" in entry.filename}


def _check_storage(tensor: Tensor, records: set[int], name: str) -> None:
    # Some versions of torch do not compare the size that the pickle gives with the record's.
    size = tensor.untyped_storage().nbytes()
    if size and size not in records:
        raise corrupt("", name, size, "bytes of storage are not in the payload", code="storage")


class _Slice(io.RawIOBase):
    """The bytes of a payload as a file of their own."""

    def __init__(self, fd: int, payload: Payload) -> None:
        self._fd, self._payload, self._position = fd, payload, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._payload.length}
        self._position = max(0, base[whence] + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self._payload.length - self._position)]
        count = read_at(self._fd, view, self._payload.start + self._position)
        self._position += count
        return count


def convert_from_dcp(
    source: Path,
    store: Path,
    step: int | None = None,
    without: Sequence[str] = (),
    positions: bool = True,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """Write the DCP checkpoint ``source`` as ``step`` of the store; returns the new directory.

    ``step`` is that of a name like ``step-100`` where it is None. ``without`` are patterns of names to
    leave out. Names and paths are DCP's, with three changes that ``Store.load({"model": model,
    "optimizer": optimizer})`` needs: tensors at the top level come below ``model``; positions in lists
    are positions again; optimizer state by parameter name, as torch's ``get_state_dict`` gives it, is by
    position, as ``torch.optim`` has it (``positions=False`` keeps the names).

    Nothing is unpickled but by ``torch.load(weights_only=True)``. Memory is one box of one tensor.
    ``progress`` gets the bytes written and the bytes of all tensors. Raises CorruptCheckpoint for damaged files, and
    ValueError for what cannot be held.
    """
    if step is None:
        found = re.fullmatch(r"(?:.*[^0-9])?(\d{1,18})", source.name)
        if found is None:
            rule = "is a name without a number, of the source"
            raise invalid("step", "missing", source.name, rule, "give one with --step")
        step = int(found[1])
    with Directory(source) as directory:
        listing = _without(read_listing(directory), without)
        values = {n: load_object(directory, p, n) for n, p in listing.objects.items()}
        paths = _paths(listing)
        if positions:
            _by_position(paths, values)
        small = [*_tensors_in_objects(paths, values)]
        entries = _objects(paths, values)

        def boxes() -> Iterator[Box]:
            for name, tensor in listing.tensors.items():
                if not tensor.boxes:
                    empty = torch.empty(tensor.shape, dtype=tensor.dtype)
                    yield Box.whole(paths[name], empty)
                for offsets, sizes, payload in tensor.boxes:
                    data = load_tensor(directory, payload, name, sizes, tensor.dtype)
                    yield Box(paths[name], tensor.shape, offsets, data)
            yield from small

        total = sum(math.prod(t.shape) * t.dtype.itemsize for t in listing.tensors.values())
        return write_checkpoint(
            store, step, [boxes()], entries, progress=lambda done: progress(done, total)
        )


def _without(listing: Listing, patterns: Sequence[str]) -> Listing:
    """The listing without the names that match one of ``patterns``."""

    def kept(entries: Mapping[str, Any]) -> dict[str, Any]:
        return {n: e for n, e in entries.items() if not any(fnmatchcase(n, p) for p in patterns)}

    return Listing(kept(listing.tensors), kept(listing.objects), kept(listing.paths))


def _paths(listing: Listing) -> dict[str, codec.Path]:
    """Our path of each name: numbers in a path of DCP are positions in a list."""
    top = {path[0] for path in listing.paths.values()}

    def ours(name: str, path: DCPPath) -> codec.Path:
        if name in listing.tensors and len(path) == 1 and "model" not in top:
            path = ("model", *path)  # a flat state, as torchtitan's model is
        return tuple(("list", step) if type(step) is int else step for step in path)

    return {name: ours(name, path) for name, path in listing.paths.items()}


def _by_position(paths: dict[str, codec.Path], values: dict[str, Any]) -> None:
    """Change optimizer state by parameter name, or by a number that DCP made a string, to positions.

    The lists ``param_groups.*.params`` give the order, in which torch numbers the parameters.
    """
    groups: dict[codec.Path, list[tuple[int, str]]] = {}
    for name, path in paths.items():
        match path[-3:]:
            case ("param_groups", ("list", int(group)), "params") if name in values:
                groups.setdefault(path[:-3], []).append((group, name))
            case _:
                pass

    for before, lists in groups.items():
        names = [name for _, name in sorted(lists)]
        if not all(
            type(values[n]) is list and {*map(type, values[n])} <= {str, int} for n in names
        ):
            continue
        position = {str(key): i for i, key in enumerate(k for n in names for k in values[n])}
        for name in names:
            values[name] = [position[str(key)] for key in values[name]]

        state = (*before, "state")
        below = [name for name, path in paths.items() if path[: len(state)] == state]
        for name in below:
            key, *slot = paths[name][len(state) :]
            if key in position:
                paths[name] = (*state, position[str(key)], *slot)
        if not below:  # DCP drops empty dicts, such as the state of SGD without momentum
            label = codec.dotted_name(state)
            paths[label], values[label] = state, {}


def _tensors_in_objects(paths: dict[str, codec.Path], values: dict[str, Any]) -> Iterator[Box]:
    """Take tensors out of objects: DCP keeps a tuple whole, with the tensors in it."""
    for name, value in list(values.items()):
        leaves, below = codec.flatten({name: value})
        if any(isinstance(leaf, Tensor) for leaf in leaves.values()):
            prefix = paths.pop(name)
            del values[name]
            for key, leaf in leaves.items():
                path = (*prefix, *below[key][1:])
                if isinstance(leaf, Tensor):
                    yield Box.whole(path, leaf.detach())
                else:
                    paths[key], values[key] = path, leaf


def _objects(paths: dict[str, codec.Path], values: dict[str, Any]) -> dict[str, ObjectEntry]:
    """The objects with our names, encoded; ValueError with --without as the fix for those that are not stored."""
    entries: dict[str, ObjectEntry] = {}
    for name, value in values.items():
        try:
            encoded = codec.encode(value, name)
        except ValueError as error:
            found = problems_of(error)
            fixes = [f"{p.fix}, or leave it out with --without '{name}'" for p in found]
            raise ProblemError([replace(p, fix=f) for p, f in zip(found, fixes)]) from None
        label = codec.dotted_name(paths[name])
        if label in entries:
            rule = "is the name of two objects"
            raise invalid(label, "duplicate", ..., rule, "leave one of them out")
        entries[label] = ObjectEntry(paths[name], encoded)
    return entries
