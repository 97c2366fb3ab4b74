"""A folder of weights as transformers saves it: one safetensors file, or shards with an index, parsed without trust.

A file is 8 bytes (length of the header, little-endian), the header (one JSON object), the tensors.
"""

import json
import math
import os
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forge_ckpt._shared.paths import open_regular as open_file
from forge_ckpt._shared.paths import user_path
from forge_ckpt._shared.problems import ProblemError, invalid
from forge_ckpt.errors import one_line
from forge_ckpt.files import byte_view, read_at

MAX_HEADER = 100_000_000  # bytes, the limit of the safetensors library
MAX_JSON = 2**28
AGAIN, _COMPLETE = "fetch the file again", "give a complete download"
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64, "U16": torch.uint16, "U32": torch.uint32,
    "U64": torch.uint64,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """A tensor of a file: where its bytes are, from ``start`` on (counted from the file's first byte)."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    length: int


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file by name.

    Raises ValueError with one line, the file and the rule, for a header that the format does not allow:
    its length, JSON, duplicate names, unknown dtypes, shapes, and bytes that overlap, leave gaps or end
    elsewhere than the file.
    """
    fd, size = open_regular(path)
    with open(fd, "rb", buffering=0):
        length = int.from_bytes(_bytes(fd, 0, 8, size, path), "little")
        if length > min(MAX_HEADER, size - 8):
            rule = f"bytes of header must fit into the file of {size} and {MAX_HEADER}"
            raise _bad(path, length, rule, code="header")
        header = parse_json(_bytes(fd, 8, length, size, path), path)
    try:
        return _entries(header, path, 8 + length, size)
    except (TypeError, KeyError) as error:
        rule = f"an entry is not dtype, shape, data_offsets ({error!r:.80})"
        raise _bad(path, ..., rule, code="entry") from error


def write_header(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
) -> tuple[bytes, dict[str, int]]:
    """The header for these tensors in their order, and the first byte of each in the file.

    Raises ValueError for a dtype that the format does not have.
    """
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        if dtype not in _NAMES:
            raise invalid(name, "dtype", dtype, "is not in safetensors", "export another dtype")
        starts[name], end = end, end + math.prod(shape) * dtype.itemsize
        offsets = [starts[name], end]
        table[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": offsets}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin aligned, as the library writes them
    first = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {n: first + at for n, at in starts.items()}


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The object of a JSON file; raises ValueError as :func:`parse_json`, and for more than 256 MiB."""
    path = user_path(path)
    fd, size = open_regular(path)
    with open(fd, "rb", buffering=0):
        if size > MAX_JSON:
            rule, fix = f"bytes must be at most {MAX_JSON}", "name the right file"
            raise invalid("", "size", size, rule, fix, where=path)
        return parse_json(_bytes(fd, 0, size, size, path), path)


def parse_json(data: bytes, path: Path) -> dict[str, Any]:
    """A JSON object in which no key stands twice; raises ValueError with the file and the rule."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in table if keys.count(key) > 1)
            raise _bad(path, twice[:80], "stands there twice", code="duplicate")
        return table

    try:
        table = json.loads(data, object_pairs_hook=unique)
    except RecursionError:
        raise _bad(path, ..., "its JSON is nested too deep", code="nested") from None
    except UnicodeDecodeError as error:
        raise _bad(path, error.start, "is a byte that is not UTF-8", code="utf8") from None
    except json.JSONDecodeError as error:
        raise _bad(path, ..., f"is not JSON: {error}", code="not_json") from None
    except ProblemError:
        raise
    except ValueError:
        raise _bad(path, ..., "a number has thousands of digits", code="digits") from None
    if not isinstance(table, dict):
        raise _bad(path, type(table).__name__, "must be an object", code="type")
    return table


def open_regular(path: Path) -> tuple[int, int]:
    """(descriptor, size) of a regular file, through links as the hub's cache has them; ValueError otherwise."""
    try:
        return open_file(path)
    except OSError as error:
        text = str(error.strerror)
        raise invalid("", "unreadable", ..., text, _COMPLETE, where=path) from error


def _bytes(fd: int, start: int, length: int, size: int, path: Path) -> bytes:
    data = bytearray(length if start + length <= size else 0)
    if start + length > size or read_at(fd, memoryview(data), start) != length:
        raise _bad(path, size, "bytes are there, and the header is longer", code="truncated")
    return bytes(data)


def _entries(header: dict[str, Any], path: Path, first: int, size: int) -> dict[str, Entry]:
    about = header.pop("__metadata__", {})
    if not isinstance(about, dict) or not all(isinstance(v, str) for v in about.values()):
        raise invalid("__metadata__", "type", ..., "must map names to text", AGAIN, where=path)
    found = {name: _entry(name, fields, path, first) for name, fields in header.items()}
    end = first
    for name, entry in sorted(found.items(), key=lambda item: (item[1].start, item[1].length)):
        if entry.start != end:
            words = "overlaps the one before it" if entry.start < end else "leaves a gap before it"
            rule = f"{words}, and tensors must follow each other"
            raise _bad(path, name[:80], rule, code="order")
        end += entry.length
    if end != size:
        rule = f"is the end of the tensors, and {size} that of the file"
        raise _bad(path, end, rule, code="length")
    return found


def _entry(name: str, fields: dict[str, Any], path: Path, first: int) -> Entry:
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]

    key = one_line(name[:80])
    if not isinstance(dtype, str) or dtype not in DTYPES:
        rule = f"must be one of {', '.join(DTYPES)}"
        raise _bad(path, dtype, rule, code="unknown", key=f"{key}.dtype")
    for label, values in (("shape", shape), ("data_offsets", offsets)):
        sound = isinstance(values, list) and len(values) <= 64
        if not sound or not all(type(n) is int and 0 <= n < 2**60 for n in values):
            raise _bad(path, values, "must be counts", code="count", key=f"{key}.{label}")

    if math.prod(n or 1 for n in shape) >= 2**60:  # torch computes strides of an empty tensor, too
        rule = "must be counts of a tensor"
        raise _bad(path, shape, rule, code="size", key=f"{key}.shape")
    length = math.prod(shape) * DTYPES[dtype].itemsize
    if len(offsets) != 2 or offsets[1] - offsets[0] != length:
        rule = f"must be {length} bytes for {dtype} {reprlib.repr(shape)}"
        raise _bad(path, offsets, rule, code="length", key=f"{key}.data_offsets")
    return Entry(path, DTYPES[dtype], tuple(shape), first + offsets[0], length)


def _bad(path: Path, value: Any, rule: str, *, code: str, key: str = "") -> Any:
    return invalid(key, code, value, rule, AGAIN, where=path)


STEM = "model"
FILE, INDEX = f"{STEM}.safetensors", f"{STEM}.safetensors.index.json"
_SHARD = re.compile(r"(?!\.)[\w.\-]{1,200}\.safetensors")
_BLOCK = 2**24  # bytes of a comparison
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


class HFFolder:
    """The tensors of a Hugging Face folder by name; each is read when it is asked for, with one read.

        folder = HFFolder("Qwen3-0.6B"); folder.read("model.norm.weight")

    Raises ValueError with one line for a folder without safetensors, a header or an index that the
    format does not allow, shards that are missing, and names that the index and the shards do not share; names that match
    ``optional``, patterns of fnmatch, may be in the index only, as exporters leave a tied head there.
    """

    def __init__(self, path: str | os.PathLike[str], optional: Sequence[str] = ()) -> None:
        self.path, self._optional = user_path(path), optional
        if not self.path.is_dir():
            fix = f"give one with config.json and {FILE}"
            raise invalid("path", "not_found", str(self.path), "is not a folder", fix)
        self.entries: dict[str, Entry] = {}
        index = self.path / INDEX
        if index.exists():
            self._read_shards(index)
        elif (self.path / FILE).exists():
            self.entries = read_header(self.path / FILE)
        else:
            pickles = [name for name in _PICKLES if (self.path / name).exists()]
            why = f"only {pickles[0]}, a pickle that could run code" if pickles else "none"
            rule = f"must hold {FILE} or {INDEX}, and there is {why}"
            raise invalid("path", "missing", str(self.path), rule, "save the model as safetensors")

    def _read_shards(self, index: Path) -> None:
        table = read_json(index).get("weight_map")
        if not isinstance(table, dict) or not all(isinstance(file, str) for file in table.values()):
            rule = "must map names to files"
            raise invalid("weight_map", "type", ..., rule, AGAIN, where=index)

        for file in dict.fromkeys(table.values()):
            if not _SHARD.fullmatch(file):
                rule = "must be a plain name that ends in .safetensors"
                raise invalid("weight_map", "name", file[:80], rule, AGAIN, where=index)
            found = read_header(self.path / file)
            listed = {name for name, other in table.items() if other == file}
            lost = {n for n in listed - found.keys() if not matches(n, self._optional)}
            if wrong := lost | (found.keys() - listed):
                name = min(wrong)
                here = "file" if name in found else "index"
                rule = f"must be in {file} and in the index, and is only in the {here}"
                raise invalid("weight_map", "mismatch", name[:80], rule, AGAIN, where=index)
            self.entries |= found

    def meta(self) -> dict[str, Tensor]:
        """Every tensor by name on the meta device: shapes and dtypes."""
        return {
            name: torch.empty(entry.shape, dtype=entry.dtype, device="meta")
            for name, entry in self.entries.items()
        }

    def read(self, name: str) -> Tensor:
        """The tensor on the CPU. Raises ValueError where the file has become shorter, and for NaN or infinite values."""
        entry = self.entries[name]
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        fd, _ = open_regular(entry.file)
        with open(fd, "rb", buffering=0):
            if read_at(fd, byte_view(tensor), entry.start) != entry.length:
                raise invalid(name, "truncated", ..., "is incomplete", AGAIN, where=entry.file)
        # by the extremes, which take no memory; 8-bit types have none
        if tensor.is_floating_point() and tensor.element_size() > 1 and tensor.numel():
            extremes = torch.stack(tensor.aminmax())
            if not extremes.isfinite().all():
                rule, fix = "has values that are NaN or infinite", "repair the file"
                raise invalid(name, "not_finite", extremes.tolist(), rule, fix, where=entry.file)
        return tensor

    def same(self, first: str, second: str) -> bool:
        """Whether two tensors have the same dtype, shape and bytes. Memory: two blocks."""
        one, other = self.entries[first], self.entries[second]
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        with open(one.file, "rb") as a, open(other.file, "rb") as b:
            a.seek(one.start)
            b.seek(other.start)
            sizes = (min(_BLOCK, one.length - done) for done in range(0, one.length, _BLOCK))
            return all(a.read(size) == b.read(size) for size in sizes)


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether one of the patterns of fnmatch is that of the name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
