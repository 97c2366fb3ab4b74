"""The indexed data sets of Megatron-LM: ids in NAME.bin, sequences and documents in NAME.idx.

.idx    9 bytes "MMIDIDX\\0\\0", uint64 version 1, uint8 code of the type, uint64 number of sequences N, uint64 number of
        document borders D; int32 (N,) lengths, int64 (N,) first bytes in .bin, int64 (D,) first sequence of each
        document and the end; little-endian. Data sets of several modalities have int8 (N,) behind.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

from forge_data._shared.paths import user_path
from forge_data._shared.problems import invalid
from forge_data.errors import InvalidData
from forge_data.sources.id_shards import IdShards, Shard, find_shards

__all__ = ["open_megatron"]

_MAGIC, _HEADER = b"MMIDIDX\x00\x00", struct.Struct("<9sQBQQ")
_TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_AT_ONCE = 1 << 22  # sequences looked at in one go


def open_megatron(path: str | Path, split: str = "train") -> IdShards:
    """The data set of NAME.idx, NAME.bin or the prefix NAME, or those of a folder in sorted order (`find_shards`).

    Documents are those of the index. Cost of opening: one read of the index, 8 bytes of memory a document. Raises
    InvalidData for an index that is damaged or not that of its .bin. Usage: `open_megatron("data/web_text_document")`.
    """
    path = user_path(path)
    if not path.is_dir():
        path = (
            path
            if path.suffix == ".idx"
            else path.with_name(path.name.removesuffix(".bin") + ".idx")
        )
    found = [_open(index) for index in find_shards(path, split, ".idx", "megatron")]
    starts, before = [], 0
    for shard, documents in found:
        starts.append(documents + before)
        before += shard.count
    return IdShards([shard for shard, _ in found], "megatron", documents=np.concatenate(starts))


def _open(index: Path) -> tuple[Shard, np.ndarray]:
    """The ids of one data set, and the first token of each document that is not empty."""
    tokens, size = index.with_suffix(".bin"), index.stat().st_size
    with index.open("rb") as file:
        head = file.read(_HEADER.size)
    if len(head) < _HEADER.size or not head.startswith(_MAGIC):
        rule = f"begin with {_MAGIC!r} and counts, and begins with {head[:12]!r}"
        raise _damaged(index, rule, code="header")
    _, version, code, sequences, borders = _HEADER.unpack(head)
    if version != 1 or code not in _TYPES:
        types = ", ".join(map(str, _TYPES))
        rule = f"have version 1 and a type of integers ({types}), and has {version} and {code}"
        raise _damaged(index, rule, code="version")
    expected = _HEADER.size + 12 * sequences + 8 * borders
    if size == expected + sequences and sequences:
        rule, fix = "must be of text, and has several modalities", "build one of text"
        raise invalid("", "modalities", ..., rule, fix, where=index, kind=InvalidData)
    if size != expected or not sequences or borders < 2:
        rule = f"have a sequence and the {expected} bytes of {sequences} sequences and {borders} borders, and has {size}"
        raise _damaged(index, rule, code="length")
    if not tokens.is_file():
        rule, fix = "is missing", f"copy it next to {index}"
        raise invalid("", "missing", ..., rule, fix, where=tokens, kind=InvalidData)
    lengths = np.memmap(index, "<i4", "r", _HEADER.size, (sequences,))
    pointers = np.memmap(index, "<i8", "r", _HEADER.size + 4 * sequences, (sequences,))
    first = np.memmap(index, "<i8", "r", _HEADER.size + 12 * sequences, (borders,))
    item = np.dtype(_TYPES[code]).itemsize
    count = _check_sequences(index, lengths, pointers, item)
    if first[0] != 0 or first[-1] != sequences or bool((np.diff(first) < 0).any()):
        rule = f"have borders of documents that rise from 0 to its {sequences} sequences, and has {first[0]}..{first[-1]}"
        raise _damaged(index, rule, code="borders")
    shard = Shard(tokens, _TYPES[code], 0, count)
    shard.check_size()
    inside = np.asarray(first[:-1])
    starts = np.unique(np.asarray(pointers[inside[inside < sequences]]) // item)  # no empty ones
    return shard, starts[starts < count]


def _check_sequences(index: Path, lengths: np.ndarray, pointers: np.ndarray, item: int) -> int:
    """Number of ids, of sequences that follow one another without a gap."""
    count = 0
    for start in range(0, len(lengths), _AT_ONCE):
        part = np.asarray(lengths[start : start + _AT_ONCE], np.int64)
        if part.min() < 0:
            rule = f"have lengths of at least 0, and one is {part.min()}"
            raise _damaged(index, rule, code="lengths")
        begins = count + np.cumsum(part) - part
        wrong = np.flatnonzero(pointers[start : start + _AT_ONCE] != begins * item)
        if wrong.size:
            i = int(wrong[0])
            found = f"sequence {start + i} begins at byte {pointers[start + i]} in place of {begins[i] * item}"
            raise _damaged(index, f"have sequences one after another, and {found}", code="order")
        count += int(part.sum())
    return count


def _damaged(index: Path, rule: str, *, code: str) -> Any:
    rule = f"must {rule}: it was damaged, or is another format"
    return invalid("", code, ..., rule, "copy it again", where=index, kind=InvalidData)
