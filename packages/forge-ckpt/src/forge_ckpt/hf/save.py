"""Weights out to a folder that transformers reads: sharded safetensors, written tensor by tensor."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from forge_ckpt._shared.hf_save import Read, write_folder
from forge_ckpt._shared.hf_tensors import HFTensors
from forge_ckpt._shared.name_rows import Row
from forge_ckpt._shared.paths import user_path
from forge_ckpt._shared.problems import invalid
from forge_ckpt._shared.safetensors_folder import STEM, matches
from forge_ckpt.protocols import WholeTensors
from forge_ckpt.read.tensors import SavedTensors


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
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write ``source`` through the rows ``maps`` as the safetensors of a new folder.

        save_hf("out", LLAMA.rows, "runs/a/checkpoints", dtype=torch.bfloat16, files={"config.json": b"..."})

    ``source`` is a state dict of whole tensors, an object that reads them (``meta``, ``read(name)``), or a checkpoint
    of any layout (a step, or a store whose newest step is taken), of which the tensors below ``prefix`` are read
    one at a time: memory is one of them and one of the parts that it is split into. ``dtype`` casts floating-point tensors but those whose
    name matches a pattern of ``keep``; those that match one of ``ignore`` are left out. A shard holds at most ``max_shard_bytes``, or one tensor; ``files``
    are written beside, ``stem`` begins the names of the safetensors, and ``extra`` has further tensors, which keep
    their names. ``progress`` gets the bytes of the source that were read, and those of all its tensors. The bytes of the
    files depend on the weights alone, not on the layout that saved them.

    The folder appears whole, by one rename after everything is synced. Raises ValueError before anything is
    written for a folder that is not empty and for tensors that no row knows or that do not fit theirs.
    """
    with _opened(source, prefix) as (meta, read):
        if extra is not None:
            meta, read = {**meta, **extra.meta}, _either(extra, read)
            maps = (*maps, *((name, name, ()) for name in extra.meta))

        sizes = {name: tensor.nbytes for name, tensor in meta.items() if not matches(name, ignore)}
        done, total = 0, sum(sizes.values())

        def counted(name: str) -> Tensor:
            nonlocal done
            tensor = read(name)
            # popped, so that it counts once: several tensors of the folder may be made of it
            done += sizes.pop(name, 0)
            progress(done, total)
            return tensor

        which: dict[str, Any] = {"dtype": dtype, "keep": keep, "ignore": ignore, "stem": stem}
        where, limit = user_path(path), max_shard_bytes
        write_folder(where, maps, meta, counted, **which, max_shard_bytes=limit, files=files)


def _either(extra: HFTensors, read: Read) -> Read:
    """A function that reads a tensor of ``extra`` there, and any other by ``read``."""
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
