"""Weights out to a folder that transformers reads: sharded safetensors, written tensor by tensor."""

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from forge_ckpt._shared.atomic import new_folder
from forge_ckpt._shared.paths import user_path
from forge_ckpt._shared.problems import invalid
from forge_ckpt.files import byte_view, write_at, write_file
from forge_ckpt.hf.folder import STEM, matches, write_header
from forge_ckpt.hf.load import HFTensors
from forge_ckpt.hf.rows import Row
from forge_ckpt.hf.stream import to_hf
from forge_ckpt.protocols import WholeTensors
from forge_ckpt.read.tensors import SavedTensors

Read = Callable[[str], Tensor]


def save_hf(
    path: str | os.PathLike[str],
    maps: Sequence[Row],
    source: str | os.PathLike[str] | Mapping[str, Tensor] | WholeTensors,
    *,
    prefix: str = "model.",
    dtype: torch.dtype | None = None,
    keep: Sequence[str] = (),
    ignore: Sequence[str] = (),
    max_shard_bytes: int = 5 * 10**9,
    files: Mapping[str, bytes] | None = None,
    stem: str = STEM,
    extra: HFTensors | None = None,
) -> None:
    """Write ``source`` through the rows ``maps`` as the safetensors of a new folder.

        save_hf("out", LLAMA.rows, "runs/a/checkpoints", dtype=torch.bfloat16, files={"config.json": b"..."})

    ``source`` is a state dict of whole tensors, an object that reads them (``meta``, ``read(name)``), or a checkpoint
    of any layout (a step, or a store whose newest step is taken), of which the tensors below ``prefix`` are read
    one at a time: memory is one of them and one of the parts that it is split into. ``dtype`` casts floating-point tensors but those whose
    name matches a pattern of ``keep``; those that match one of ``ignore`` are left out. A shard holds at most ``max_shard_bytes``, or one tensor; ``files``
    are written beside, ``stem`` begins the names of the safetensors, and ``extra`` has further tensors, which keep
    their names. The bytes depend on the weights alone, not on the layout that saved them.

    The folder appears whole, by one rename after everything is synced. Raises ValueError before anything is
    written for a folder that is not empty and for tensors that no row knows or that do not fit theirs.
    """
    out = user_path(path)
    if os.path.lexists(out) and (out.is_symlink() or not out.is_dir() or any(out.iterdir())):
        rule = "exists, and must be a new or an empty folder"
        raise invalid("path", "exists", str(out), rule, "choose another")
    with _opened(source, prefix) as (meta, read):
        if extra is not None:
            meta, read = {**meta, **extra.meta}, _either(extra, read)
            maps = (*maps, *((name, name, ()) for name in extra.meta))
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
                write_file(folder / name, content)


def _either(extra: HFTensors, read: Read) -> Read:
    return lambda name: (extra.read if name in extra.meta else read)(name)


@contextlib.contextmanager
def _opened(
    source: str | os.PathLike[str] | Mapping[str, Tensor] | WholeTensors, prefix: str
) -> Iterator[tuple[dict[str, Tensor], Read]]:
    """Shapes and dtypes of the tensors by name, on the meta device, and a function that reads one."""
    if isinstance(source, Mapping):
        for name, tensor in source.items():
            if isinstance(tensor, DTensor):
                rule, fix = "is a DTensor, and must be full", "save a checkpoint and give its path"
                raise invalid(name, "sharded", ..., rule, fix)
        yield {name: tensor.to("meta") for name, tensor in source.items()}, source.__getitem__
        return
    if not isinstance(source, (str, os.PathLike)):
        yield dict(source.meta), source.read
        return

    with SavedTensors(source) as saved:
        names = [name for name in saved.table.tensors if name.startswith(prefix)]
        if not names:
            rule = f"begins the name of no tensor in {saved.path}"
            raise invalid("prefix", "not_found", prefix, rule, "give another prefix")
        yield (
            {name.removeprefix(prefix): saved.meta(name) for name in names},
            lambda name: saved.read(prefix + name),
        )


def _cast(name: str, tensor: Tensor, dtype: torch.dtype | None, keep: Sequence[str]) -> torch.dtype:
    if dtype is None or not tensor.is_floating_point() or matches(name, keep):
        return tensor.dtype
    return dtype


def _in_numbers(name: str) -> list[tuple[int, str]]:
    """A key that puts layer 10 behind layer 9."""
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
    write_file(path, header)
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
