"""A folder that transformers reads: sharded safetensors, written tensor by tensor."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .atomic import new_folder
from .file_bytes import byte_view, write_at, write_new_file
from .name_maps import to_hf
from .name_rows import Row
from .problems import invalid
from .safetensors_folder import STEM, matches
from .safetensors_headers import write_header

Read = Callable[[str], Tensor]


def write_folder(
    out: Path,
    maps: Sequence[Row],
    meta: Mapping[str, Tensor],
    read: Read,
    *,
    dtype: torch.dtype | None = None,
    keep: Sequence[str] = (),
    ignore: Sequence[str] = (),
    max_shard_bytes: int = 5 * 10**9,
    files: Mapping[str, bytes] | None = None,
    stem: str = STEM,
) -> None:
    """Write the tensors `meta`, which `read` gives one at a time, through the rows `maps` as a new folder.

    `dtype` casts floating-point tensors but those whose name matches a pattern of `keep`; those that match one of
    `ignore` are left out. The folder appears whole, by one rename after everything is synced. Raises ValueError before
    anything is written for a folder that is not empty and for tensors that no row knows or that do not fit theirs.
    """
    if os.path.lexists(out) and (out.is_symlink() or not out.is_dir() or any(out.iterdir())):
        rule = "exists, and must be a new or an empty folder"
        raise invalid("path", "exists", str(out), rule, "choose another")
    order = sorted((n for n in meta if not matches(n, ignore)), key=_in_numbers)
    casts = {name: _cast(name, meta[name], dtype, keep) for name in order}

    def cast(name: str, tensors: Callable[[str], Tensor]) -> Tensor:
        return tensors(name).detach().to(casts[name])

    shapes = to_hf(maps, ((name, cast(name, meta.__getitem__)) for name in order))
    shards = _shards({name: tensor for name, tensor in shapes}, max_shard_bytes, stem)
    with new_folder(out) as folder:
        tensors = to_hf(maps, ((name, cast(name, read)) for name in order))
        for name, shard in shards.items():
            _write_shard(folder / name, shard, tensors)
        for name, content in {**_index(shards, stem), **(files or {})}.items():
            write_new_file(folder / name, content)


def merged_config(original: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    """A `config.json`: `written` over the original, and so its tables of parts (text_config) of the same model_type.

    The token that fills up rows stays: it is the tokenizer's.
    """
    found = {**original, **written}
    for key, value in written.items():
        before = original.get(key)
        if not isinstance(value, dict) or not isinstance(before, dict):
            continue
        if "model_type" in value and before.get("model_type") == value["model_type"]:
            found[key] = {**before, **value}
    if "pad_token_id" in original:
        found["pad_token_id"] = original["pad_token_id"]
    return found


def _cast(name: str, tensor: Tensor, dtype: torch.dtype | None, keep: Sequence[str]) -> torch.dtype:
    if dtype is None or not tensor.is_floating_point() or matches(name, keep):
        return tensor.dtype
    return dtype


def _in_numbers(name: str) -> list[tuple[int, str]]:
    """A key that puts layer 10 after layer 9."""
    return [(int(p), "") if p.isdecimal() else (-1, p) for p in re.split(r"(\d+)", name)]


def _shards(tensors: Mapping[str, Tensor], limit: int, stem: str) -> dict[str, dict[str, Tensor]]:
    """{file: tensors}: filled in order, each file up to ``limit`` bytes."""
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if parts[-1] and size + tensor.nbytes > limit:
            parts.append({})
            size = 0
        parts[-1][name] = tensor
        size += tensor.nbytes
    if len(parts) == 1:
        return {f"{stem}.safetensors": parts[0]}
    return {f"{stem}-{i:05d}-of-{len(parts):05d}.safetensors": p for i, p in enumerate(parts, 1)}


def _index(shards: Mapping[str, Mapping[str, Tensor]], stem: str) -> dict[str, bytes]:
    if len(shards) == 1:
        return {}
    size = sum(tensor.nbytes for shard in shards.values() for tensor in shard.values())
    table = {
        "metadata": {"total_size": size},
        "weight_map": {name: file for file, shard in shards.items() for name in shard},
    }
    return {f"{stem}.safetensors.index.json": json.dumps(table, indent=2).encode() + b"\n"}


def _write_shard(
    path: Path, shard: Mapping[str, Tensor], tensors: Iterator[tuple[str, Tensor]]
) -> None:
    """A file of the tensors that ``shard`` announces, taken from the front of ``tensors``."""
    header, starts = write_header({n: (t.dtype, tuple(t.shape)) for n, t in shard.items()})
    write_new_file(path, header)
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        for wanted, start in starts.items():
            name, tensor = next(tensors)
            assert name == wanted, (name, wanted)
            host = tensor.cpu().contiguous()
            write_at(fd, byte_view(host), start)
            del tensor, host  # or they would live while the next one is read
        os.fsync(fd)
    finally:
        os.close(fd)
