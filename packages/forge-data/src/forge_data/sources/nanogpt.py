"""Token files of nanoGPT, llm.c and modded-nanogpt: `.bin` without a header, or with one of 256 int32.

Header    magic, version, number of ids, zeros. Magic 20240520, version 1: uint16. Magic 20240801, version 7: uint32.
Without   ids alone, uint16 as nanoGPT writes them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from forge_data._shared.problems import invalid
from forge_data.errors import InvalidData
from forge_data.sources.id_shards import IdShards, Shard, find_shards

__all__ = ["open_nanogpt"]

_FORMATS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}  # magic: version, type
_WORDS = 256


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
    shards = [_shard(file, dtype) for file in find_shards(path, split, ".bin", "nanogpt")]
    kinds = {(shard.dtype, shard.offset) for shard in shards}
    if len(kinds) > 1:
        found = f"{len(kinds)} kinds ({shards[0].path.name} another than a later one)"
        rule = f"must hold .bin files of one header and type, and has {found}"
        raise invalid("path", "mixed", str(path), rule, "keep one kind there", kind=InvalidData)
    return IdShards(shards, "nanogpt", eos_id=eos_id, bos_id=bos_id)


def _shard(path: Path, dtype: str | None) -> Shard:
    size = path.stat().st_size
    with path.open("rb") as file:
        words = np.frombuffer(file.read(4 * _WORDS).ljust(4 * _WORDS, b"\xff"), "<i4")  # (256,)
    magic, version, count = (int(word) for word in words[:3])
    if magic in _FORMATS:
        known, kind = _FORMATS[magic]
        if version != known:
            rule, fix = f"of its format must be {known}", "convert it"
            raise invalid(
                "version", "unsupported", version, rule, fix, where=path, kind=InvalidData
            )
        if dtype not in (None, kind):
            rule = f"must be that of the header of {path}, {kind!r}"
            raise invalid("dtype", "mismatch", dtype, rule, "remove dtype")
        shard = Shard(path, kind, 4 * _WORDS, count)
        shard.check_size()
        return shard
    if not words[3:].any():  # else its zeros would be learnt as tokens
        rule = f"of its header of 256 int32 must be one of {', '.join(map(str, _FORMATS))}: it was damaged"
        raise invalid(
            "magic", "unknown", magic, rule, "copy it again", where=path, kind=InvalidData
        )
    if words.tobytes().startswith(np.lib.format.MAGIC_PREFIX):
        rule, fix = "must be ids, and begins as a .npy file", 'use name = "npy", and end it in .npy'
        raise invalid("", "header", ..., rule, fix, where=path, kind=InvalidData)
    kind = dtype or "uint16"
    item = np.dtype(kind).itemsize
    if size == 0 or size % item:
        rule = f"bytes must be a positive multiple of {item} for {kind}"
        fix = "copy it again, or give the dtype it was written with"
        raise invalid("", "length", size, rule, fix, where=path, kind=InvalidData)
    return Shard(path, kind, 0, size // item)
