"""Open the token files of other projects: nanoGPT and llm.c, numpy, Megatron-LM.

.bin of nanoGPT, llm.c and modded-nanogpt
    With a header of 256 int32: magic, version, number of ids, zeros. Magic 20240520, version 1: uint16. Magic 20240801,
    version 7: uint32. Without a header: ids only, uint16 as nanoGPT writes them.
.npy    an array of integers with one dim
.idx    of Megatron-LM, with its ids in a .bin: 9 bytes "MMIDIDX\\0\\0", uint64 version 1, uint8 code of the type, uint64
        number of sequences N, uint64 number of document boundaries D; int32 (N,) lengths, int64 (N,) first bytes in .bin,
        int64 (D,) first sequence of each document and the end; little-endian. Data sets of several modalities add int8 (N,).
"""

from __future__ import annotations

import math
import struct
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from forge_data._shared.paths import user_path
from forge_data._shared.problems import invalid
from forge_data.config import DTYPES
from forge_data.errors import invalid_data
from forge_data.tokens.raw import IdShards, Shard, find_shards

__all__ = ["open_megatron", "open_nanogpt", "open_npy"]

# magic: version, type, as llm.c writes them
_NANOGPT_FORMATS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}
_HEADER_WORDS = 256
_NPY_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
_INDEX_MAGIC, _INDEX_HEADER = b"MMIDIDX\x00\x00", struct.Struct("<9sQBQQ")
_INDEX_TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_SEQUENCES_AT_ONCE = 1 << 22  # sequences per read: bounds the memory of a check


def open_nanogpt(
    path: str | Path,
    split: str = "train",
    dtype: str | None = None,
    eos_id: int | None = None,
    bos_id: int | None = None,
) -> IdShards:
    """One `.bin` file, or a folder of them in sorted order as one source (`find_shards`).

    `dtype` is that of files without a header (default: uint16). nanoGPT ends documents with GPT-2's id 50256 (`eos_id`), llm.c
    and modded-nanogpt begin them with it (`bos_id`). Raises InvalidData for damaged files, ValueError for a `dtype`
    that a header contradicts. Usage: `open_nanogpt("data/openwebtext", eos_id=50256)`.
    """
    shards = [_nanogpt_shard(file, dtype) for file in find_shards(path, split, ".bin", "nanogpt")]
    kinds = {(shard.dtype, shard.offset) for shard in shards}
    if len(kinds) > 1:
        found = f"{len(kinds)} kinds ({shards[0].path.name} another than a later one)"
        rule = f"must hold .bin files of one header and type, and has {found}"
        raise invalid_data("path", "mixed", str(path), rule, "keep one kind there")
    return IdShards(shards, "nanogpt", eos_id=eos_id, bos_id=bos_id)


def _nanogpt_shard(path: Path, dtype: str | None) -> Shard:
    with path.open("rb") as file:
        words = np.frombuffer(
            file.read(4 * _HEADER_WORDS).ljust(4 * _HEADER_WORDS, b"\xff"), "<i4"
        )  # (256,)
    magic, version, count = (int(word) for word in words[:3])

    if magic in _NANOGPT_FORMATS:
        known, kind = _NANOGPT_FORMATS[magic]
        if version != known:
            rule, fix = f"of its format must be {known}", "convert it"
            raise invalid_data("version", "unsupported", version, rule, fix, where=path)
        if dtype not in (None, kind):
            rule = f"must be that of the header of {path}, {kind!r}"
            raise invalid("dtype", "mismatch", dtype, rule, "remove dtype")

        shard = Shard(path, kind, 4 * _HEADER_WORDS, count)
        shard.check_size()
        return shard
    if not words[3:].any():  # else its zeros would be trained as tokens
        rule = f"of its header of 256 int32 must be one of {', '.join(map(str, _NANOGPT_FORMATS))}: it was damaged"
        raise invalid_data("magic", "unknown", magic, rule, "copy it again", where=path)

    if words.tobytes().startswith(np.lib.format.MAGIC_PREFIX):
        rule, fix = "must be ids, and begins as a .npy file", 'use name = "npy", and end it in .npy'
        raise invalid_data("", "header", ..., rule, fix, where=path)

    return Shard.of_file(path, dtype or "uint16")


def open_npy(
    path: str | Path, split: str = "train", eos_id: int | None = None, bos_id: int | None = None
) -> IdShards:
    """One `.npy` file, or a folder of them in sorted order as one source (`find_shards`).

    Documents end with `eos_id` or begin with `bos_id`. Raises InvalidData for files that are damaged, hold objects (a
    pickle runs code) or anything else but integers in one dim. Usage: `open_npy("shards", bos_id=50256)`.
    """
    shards = [_npy_shard(file) for file in find_shards(path, split, ".npy", "npy")]
    return IdShards(shards, "npy", eos_id=eos_id, bos_id=bos_id)


def _npy_shard(path: Path) -> Shard:
    try:
        with path.open("rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            shape, _, dtype = _NPY_HEADERS[np.lib.format.read_magic(file)](file)
            offset = file.tell()
    except OSError:
        raise
    except Exception as error:  # the header is text for Python's parser, which fails in many ways
        rule = f"must begin with a header of numpy's .npy format 1.0 or 2.0 ({type(error).__name__}: {error})"
        fix = "copy it again, or save it with numpy.save"
        raise invalid_data("", "header", ..., rule, fix, where=path) from None

    if dtype.name not in DTYPES or dtype.byteorder == ">" or len(shape) != 1:
        rule = f"in {len(shape)} dims must be little-endian {', '.join(DTYPES)} in one"
        fix = 'save its ids with numpy.save(path, ids.reshape(-1).astype("<u4"))'
        raise invalid_data("dtype", "unsupported", dtype.str, rule, fix, where=path)
    shard = Shard(path, dtype.name, offset, math.prod(shape))
    shard.check_size()
    return shard


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
    found = [_open_index(index) for index in find_shards(path, split, ".idx", "megatron")]
    starts, before = [], 0
    for shard, documents in found:
        starts.append(documents + before)
        before += shard.count
    return IdShards([shard for shard, _ in found], "megatron", documents=np.concatenate(starts))


def _open_index(index: Path) -> tuple[Shard, np.ndarray]:
    """The ids of one data set, and the first token of each document that is not empty."""
    tokens, size = index.with_suffix(".bin"), index.stat().st_size
    with index.open("rb") as file:
        head = file.read(_INDEX_HEADER.size)
    if len(head) < _INDEX_HEADER.size or not head.startswith(_INDEX_MAGIC):
        rule = f"begin with {_INDEX_MAGIC!r} and counts, and begins with {head[:12]!r}"
        raise _damaged(index, rule, code="header")

    _, version, code, sequences, boundaries = _INDEX_HEADER.unpack(head)
    if version != 1 or code not in _INDEX_TYPES:
        types = ", ".join(map(str, _INDEX_TYPES))
        rule = f"have version 1 and a type of integers ({types}), and has {version} and {code}"
        raise _damaged(index, rule, code="version")

    expected = _INDEX_HEADER.size + 12 * sequences + 8 * boundaries
    if size == expected + sequences and sequences:
        rule, fix = "must be of text, and has several modalities", "build one of text"
        raise invalid_data("", "modalities", ..., rule, fix, where=index)
    if size != expected or not sequences or boundaries < 2:
        rule = f"have a sequence and the {expected} bytes of {sequences} sequences and {boundaries} boundaries, and has {size}"
        raise _damaged(index, rule, code="length")
    if not tokens.is_file():
        rule, fix = "is missing", f"copy it next to {index}"
        raise invalid_data("", "missing", ..., rule, fix, where=tokens)

    lengths = np.memmap(index, "<i4", "r", _INDEX_HEADER.size, (sequences,))
    pointers = np.memmap(index, "<i8", "r", _INDEX_HEADER.size + 4 * sequences, (sequences,))
    first = np.memmap(index, "<i8", "r", _INDEX_HEADER.size + 12 * sequences, (boundaries,))
    item = np.dtype(_INDEX_TYPES[code]).itemsize
    count = _check_sequences(index, lengths, pointers, item)
    if first[0] != 0 or first[-1] != sequences or bool((np.diff(first) < 0).any()):
        rule = f"have boundaries of documents that rise from 0 to its {sequences} sequences, and has {first[0]}..{first[-1]}"
        raise _damaged(index, rule, code="borders")

    shard = Shard(tokens, _INDEX_TYPES[code], 0, count)
    shard.check_size()
    inside = np.asarray(first[:-1])
    # unique, as an empty one begins where the next does
    starts = np.unique(np.asarray(pointers[inside[inside < sequences]]) // item)
    return shard, starts[starts < count]


def _check_sequences(index: Path, lengths: np.ndarray, pointers: np.ndarray, item: int) -> int:
    """Number of ids, of sequences that follow one another without a gap."""
    count = 0
    for start in range(0, len(lengths), _SEQUENCES_AT_ONCE):
        part = np.asarray(lengths[start : start + _SEQUENCES_AT_ONCE], np.int64)
        if part.min() < 0:
            rule = f"have lengths of at least 0, and one is {part.min()}"
            raise _damaged(index, rule, code="lengths")
        begins = count + np.cumsum(part) - part
        wrong = np.flatnonzero(pointers[start : start + _SEQUENCES_AT_ONCE] != begins * item)
        if wrong.size:
            i = int(wrong[0])
            found = f"sequence {start + i} begins at byte {pointers[start + i]} in place of {begins[i] * item}"
            raise _damaged(index, f"have sequences one after another, and {found}", code="order")
        count += int(part.sum())
    return count


def _damaged(index: Path, rule: str, *, code: str) -> Any:
    rule = f"must {rule}: it was damaged, or is another format"
    return invalid_data("", code, ..., rule, "copy it again", where=index)
