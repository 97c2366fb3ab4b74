# Copied from scripts/shared/safetensors_headers.py; edit that file, then run scripts/copy_shared.py.
"""Headers of safetensors files and the JSON next to them, parsed without trust.

A file is 8 bytes (length of the header, little-endian), the header (one JSON object), the tensors.
"""

from __future__ import annotations

import json
import math
import os
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .file_bytes import read_at
from .paths import open_regular as open_file
from .paths import user_path
from .problems import ProblemError, invalid

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

    key = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name[:80])
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
