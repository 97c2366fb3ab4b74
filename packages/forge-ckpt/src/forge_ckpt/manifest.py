"""The manifest: files, tensors and objects of a checkpoint, and the record of its commit.

The file is one JSON object, ``{"sha256": "<64 hex>", "manifest": {...}}``, with the digest over the
exact bytes of the inner object. The frame around it is compared byte by byte, so a change of any
byte of the file is found.

Format 1 has sha256 for the blocks of the data files. Format 2 is format 1 with the name of another
digest of them (``"digest": "blake3"``); it is written for those alone, so that older versions read all others.
"""

import hashlib
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from forge_ckpt import codec
from forge_ckpt._shared.file_bytes import read_at
from forge_ckpt._shared.problems import invalid
from forge_ckpt.errors import CheckpointMismatch, corrupt, restated
from forge_ckpt.files import Directory

NAME = "manifest.json"
FORMATS = (1, 2)
BLOCK_BYTES = 4 * 2**20
ALIGN = 64  # each tensor starts at a multiple, so that any dtype can be memory-mapped
MAX_BYTES = 2**30  # bounds the memory of a read; as many describe about 60 TB of tensors
MAX_DIMS = 64  # torch makes no tensor of more
_FILE = re.compile(r"data-(0|[1-9][0-9]{0,6})\.bin")
_HEX = re.compile(r"[0-9a-f]{64}")
_PREFIX, _MIDDLE, _SUFFIX = b'{"sha256": "', b'", "manifest": ', b"}\n"


Extent = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor and the location of its bytes: row-major, native byte order (little-endian)."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class TensorEntry:
    path: codec.Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class ObjectEntry:
    path: codec.Path
    value: Any  # tagged JSON (codec.py), as plain JSON has no tuples, bytes or dtypes


@dataclass(frozen=True)
class FileEntry:
    """``blocks``: digest of each BLOCK_BYTES of the file; ``root``: digest of their concatenation."""

    size: int
    root: str
    blocks: tuple[str, ...]

    @staticmethod
    def of(size: int, blocks: tuple[str, ...], digest: str = codec.DEFAULT_DIGEST) -> "FileEntry":
        root = codec.digest_function(digest)(bytes.fromhex("".join(blocks)))
        return FileEntry(size, root, blocks)


@dataclass(frozen=True)
class Manifest:
    """The table of one checkpoint. ``torch`` is the version that saved it, for information.

    ``metrics``: the caller's numbers of the step, by which retention finds the best. ``digest``: the
    name of the digest of ``files`` (see :mod:`forge_ckpt.codec`).
    """

    step: int | None
    torch: str
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]
    objects: dict[str, ObjectEntry]
    metrics: dict[str, float] = field(default_factory=dict)
    digest: str = codec.DEFAULT_DIGEST

    def paths(self) -> dict[str, codec.Path]:
        """The path of every saved name."""
        entries: dict[str, TensorEntry | ObjectEntry] = {**self.tensors, **self.objects}
        return {name: entry.path for name, entry in entries.items()}

    def below(self, name: str) -> dict[codec.Path, str]:
        """{path below ``name``: saved name} of tensors and objects."""
        return {path[1:]: key for key, path in self.paths().items() if path[0] == name}

    def tensors_below(self, name: str) -> dict[str, str]:
        """{name below ``name``: saved name} of tensors."""
        prefix = f"{name}."
        found = (key for key, entry in self.tensors.items() if entry.path[0] == name)
        return {key.removeprefix(prefix): key for key in found}

    def content(self) -> tuple[Any, ...]:
        """A key that is equal for two checkpoints of the same bits, whatever torch wrote them."""
        return self.step, self.files, self.tensors, self.objects


def encode(manifest: Manifest) -> bytes:
    """The bytes of the file."""
    body = codec.dumps(_to_json(manifest)).encode()
    digest = hashlib.sha256(body).hexdigest().encode()
    return _PREFIX + digest + _MIDDLE + body + _SUFFIX


def read(directory: Directory, step: int | None = None) -> Manifest:
    """The verified manifest of an open directory, its files' sizes compared with the disk's.

    Raises CorruptCheckpoint for a missing, changed or impossible manifest, for another step than
    ``step``, and for a file that is missing, no regular file or of another size; CheckpointMismatch
    for a format that a newer version wrote, and for a digest whose package is not installed.
    """
    return check(read_bytes(directory), directory, step)


def read_from(path: Path, step: int | None = None, seconds: float = 0.0) -> Manifest:
    """:func:`read` of a directory that is not open; its names are waited for ``seconds``."""
    with Directory(path, seconds) as directory:
        return read(directory, step)


def check(data: bytes, directory: Directory, step: int | None = None) -> Manifest:
    """:func:`read` for the bytes that :func:`read_bytes` returned."""
    where = str(directory.path / NAME)
    manifest = decode(data, where)
    if step is not None and manifest.step != step:
        raise corrupt(where, "step", manifest.step, f"must be {step}", code="mismatch")
    for name, entry in manifest.files.items():
        fd, size = directory.open(name)
        with open(fd, "rb", buffering=0):
            if size != entry.size:
                rule = f"bytes are there, {entry.size} were saved"
                raise corrupt(directory.path / name, "", size, rule, code="length")
    return manifest


def read_bytes(directory: Directory) -> bytes:
    """The bytes of the file, not yet verified; raises CorruptCheckpoint if it cannot be read."""
    where = str(directory.path / NAME)
    fd, size = directory.open(NAME)
    with open(fd, "rb", buffering=0):
        if size > MAX_BYTES:
            raise corrupt(where, "", size, f"bytes must be at most {MAX_BYTES}", code="size")
        # The first bytes before the rest: a foreign file may have a gigabyte.
        head = bytearray(len(_PREFIX))
        if read_at(fd, memoryview(head), 0) != len(head) or head != _PREFIX:
            raise _damaged(where)
        data = bytearray(size)
        if read_at(fd, memoryview(data), 0) != size:
            raise corrupt(where, "", ..., "changed while it was read", code="changed")
    return bytes(data)


def _damaged(where: str) -> Any:
    """The error of bytes that are not those of their digest, to be raised."""
    return corrupt(where, "", ..., "does not match its own digest", code="digest")


def digest_of(directory: Directory) -> str:
    """The sha256 of the inner object, as the file says it."""
    return read_bytes(directory)[len(_PREFIX) : len(_PREFIX) + 64].decode()


def decode(data: bytes, where: str) -> Manifest:
    """The manifest, its frame, digest, format and every number checked; ``where`` names the file."""
    head = len(_PREFIX) + 64
    digest = data[len(_PREFIX) : head]
    body = data[head + len(_MIDDLE) : -len(_SUFFIX)]
    frame = (data[: len(_PREFIX)], data[head : head + len(_MIDDLE)], data[-len(_SUFFIX) :])
    if frame != (_PREFIX, _MIDDLE, _SUFFIX) or hashlib.sha256(body).hexdigest().encode() != digest:
        raise _damaged(where)
    try:
        # Decoded first, as json.loads would take bytes of UTF-16, too.
        table = json.loads(body.decode())
        number = table["format"]
    except (ValueError, RecursionError, TypeError, KeyError) as error:
        rule = f"is not a manifest ({error!r:.300})"
        raise corrupt(where, "", ..., rule, code="not_json") from error

    if number not in FORMATS:
        rule = f"must be {' or '.join(map(str, FORMATS))} for this forge-ckpt"
        fix, kind = "use the version that wrote it", CheckpointMismatch
        raise invalid("format", "version", number, rule, fix, where=where, kind=kind)
    of_blocks = codec.DEFAULT_DIGEST if number == 1 else table.get("digest")
    try:
        codec.digest_function(of_blocks)
    except ValueError as error:
        raise restated(error, where, CheckpointMismatch) from None
    try:
        return _from_json(table, of_blocks)
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise restated(error, f"{where}: impossible entry") from error


def summary(table: Manifest) -> dict[str, Any]:
    """Sizes, shapes and names as plain JSON (see ``Store.inspect``)."""
    tensors = {
        name: {
            "shape": list(entry.shape),
            "dtype": codec.dtype_name(entry.dtype),
            "bytes": sum(chunk.length for chunk in entry.chunks),
        }
        for name, entry in table.tensors.items()
    }

    return {
        "step": table.step,
        "torch": table.torch,
        "bytes": sum(entry.size for entry in table.files.values()),
        "files": {name: entry.size for name, entry in table.files.items()},
        "tensors": tensors,
        "objects": sorted(table.objects, key=str),
    }


def _to_json(manifest: Manifest) -> dict[str, Any]:
    tensors, number = {}, 1 if manifest.digest == codec.DEFAULT_DIGEST else 2
    for name, entry in manifest.tensors.items():
        keys = ("offsets", "sizes", "file", "start", "bytes")
        chunks = [dict(zip(keys, vars(chunk).values())) for chunk in entry.chunks]
        path, dtype = codec.path_to_json(entry.path), codec.dtype_name(entry.dtype)
        tensors[name] = {"path": path, "shape": entry.shape, "dtype": dtype, "chunks": chunks}

    files = {
        name: {"bytes": entry.size, "root": entry.root, "blocks": entry.blocks}
        for name, entry in manifest.files.items()
    }
    objects = {
        name: {"path": codec.path_to_json(entry.path), "value": entry.value}
        for name, entry in manifest.objects.items()
    }

    return {
        "format": number,
        **({"digest": manifest.digest} if number > 1 else {}),
        "step": manifest.step,
        **({"metrics": manifest.metrics} if manifest.metrics else {}),
        "torch": manifest.torch,
        "block_bytes": BLOCK_BYTES,
        "files": files,
        "tensors": tensors,
        "objects": objects,
    }


def _from_json(table: dict[str, Any], digest: str) -> Manifest:
    if table["block_bytes"] != BLOCK_BYTES:
        raise invalid("block_bytes", "unsupported", table["block_bytes"], f"must be {BLOCK_BYTES}")
    step = table["step"]
    if step is not None:
        _count(step, "step")

    files = {name: _file(name, entry, digest) for name, entry in table["files"].items()}
    tensors = {name: _tensor(name, entry, files) for name, entry in table["tensors"].items()}
    object_entries = {
        name: ObjectEntry(codec.path_from_json(entry["path"]), entry["value"])
        for name, entry in table["objects"].items()
    }
    metrics = check_metrics(table.get("metrics", {}))
    manifest = Manifest(step, str(table["torch"]), files, tensors, object_entries, metrics, digest)
    if both := tensors.keys() & object_entries.keys():
        raise invalid(min(both), "duplicate", ..., "is the name of a tensor and of an object")
    for name, path in manifest.paths().items():
        if codec.dotted_name(path) != name:
            raise invalid(name, "path", path, "is the path of another name")
    return manifest


def check_metrics(table: Mapping[Any, Any]) -> dict[str, float]:
    """The numbers of a step by name; raises ValueError for one that is not finite, or has no name."""
    for name, value in table.items():
        # `not ... <` is true of nan, too; and it converts no int, because 10**400 has no float
        if type(name) is not str or type(value) not in (int, float) or not abs(value) < 1e300:
            rule = "must be a finite number with a name"
            raise invalid(f"metrics.{name}", "finite", value, rule)
    return {name: float(value) for name, value in table.items()}


def _file(name: str, entry: dict[str, Any], digest: str) -> FileEntry:
    """The entry of a file; ValueError for a name outside the directory, and for digests that do not fit."""
    if not _FILE.fullmatch(name):
        raise invalid("files", "name", name, "must be data-<number>.bin inside the directory")
    blocks = tuple(entry["blocks"])
    if not all(isinstance(block, str) and _HEX.fullmatch(block) for block in blocks):
        raise invalid(name, "hex", ..., "must have blocks of 64 hex digits")
    file = FileEntry.of(_count(entry["bytes"], name), blocks, digest)
    if len(blocks) != -(-file.size // BLOCK_BYTES) or file.root != entry["root"]:
        rule = f"blocks do not fit the {file.size} bytes or the root digest"
        raise invalid(name, "blocks", len(blocks), rule)
    return file


def _tensor(name: str, entry: dict[str, Any], files: dict[str, FileEntry]) -> TensorEntry:
    """The entry of a tensor, whose chunks must tile it; raises ValueError."""
    if len(entry["shape"]) > MAX_DIMS:
        rule = f"dims are more than the {MAX_DIMS} of any tensor"
        raise invalid(name, "dims", len(entry["shape"]), rule)
    shape = tuple(_count(n, name) for n in entry["shape"])
    dtype = codec.dtype_from_name(entry["dtype"])
    chunks = tuple(_chunk(name, chunk, dtype, files) for chunk in entry["chunks"])
    check_tiling(name, shape, [(chunk.offsets, chunk.sizes) for chunk in chunks])
    return TensorEntry(codec.path_from_json(entry["path"]), shape, dtype, chunks)


def check_tiling(name: str, shape: tuple[int, ...], boxes: Sequence[Extent]) -> None:
    """Raise ValueError unless ``boxes`` cover the tensor ``name`` of ``shape``, and none twice.

    Boxes inside the tensor that do not overlap and have its volume cover all of it: no element of the
    state would keep an old value.
    """
    for offsets, sizes in boxes:
        if not len(offsets) == len(sizes) == len(shape) or any(
            offset + size > limit for offset, size, limit in zip(offsets, sizes, shape)
        ):
            rule = f"is the place of a chunk of {sizes} outside of shape {shape}"
            raise invalid(name, "outside", offsets, rule)
    if sum(math.prod(sizes) for _, sizes in boxes) != math.prod(shape):
        raise invalid(name, "volume", ..., f"has chunks that do not add up to shape {shape}")
    if not _are_separable(boxes, len(shape)):
        raise invalid(name, "overlap", ..., "has chunks that overlap")


def _are_separable(boxes: Sequence[Extent], num_dims: int) -> bool:
    """Whether cuts along whole dims separate all boxes, as in every DTensor layout; n log n a cut."""
    if len(boxes) < 2:
        return True
    for dim in range(num_dims):
        ordered = sorted(boxes, key=lambda box: box[0][dim])
        groups, end = [[ordered[0]]], 0
        for (offsets, sizes), box in itertools.pairwise(ordered):
            end = max(end, offsets[dim] + sizes[dim])
            if box[0][dim] >= end:
                groups.append([])
            groups[-1].append(box)
        if len(groups) > 1:
            return all(_are_separable(group, num_dims) for group in groups)
    return False


def _chunk(
    name: str, entry: dict[str, Any], dtype: torch.dtype, files: dict[str, FileEntry]
) -> Chunk:
    """The entry of a chunk, whose bytes must be in a file; raises ValueError."""
    offsets = tuple(_count(n, name) for n in entry["offsets"])
    sizes = tuple(_count(n, name) for n in entry["sizes"])
    start, length = _count(entry["start"], name), _count(entry["bytes"], name)
    if length != math.prod(sizes) * dtype.itemsize or length == 0:
        raise invalid(name, "length", length, f"bytes do not fit a chunk of {sizes} {dtype}")
    if start + length > files[entry["file"]].size:
        raise invalid(name, "range", start + length, f"is after the end of {entry['file']}")
    return Chunk(offsets, sizes, entry["file"], start, length)


def _count(value: Any, name: str) -> int:
    """``value`` if it is an integer of 0 or more, below 2**60, else ValueError."""
    if type(value) is not int or not 0 <= value < 2**60:
        raise invalid(name, "count", value, "must be an integer of 0 or more")
    return value
