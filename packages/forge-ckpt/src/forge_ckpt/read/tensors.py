"""The tensors of a checkpoint, whole, one at a time: nothing is built and no state is needed."""

import os
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forge_ckpt import codec, directories, manifest
from forge_ckpt._shared.file_bytes import byte_view
from forge_ckpt._shared.paths import user_path
from forge_ckpt._shared.problems import invalid
from forge_ckpt.directories import refuse_foreign
from forge_ckpt.manifest import Manifest
from forge_ckpt.read.blocks import LastBlock, Segment, read_segments
from forge_ckpt.read.reader import ForgeReader, box_span


def read_tensors(
    path: str | os.PathLike[str], patterns: Sequence[str] = ("*",)
) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor on the CPU) of a checkpoint, whatever layout saved it, in saved order.

        for name, tensor in read_tensors("runs/a/checkpoints", ["model.*"]): ...

    ``path`` is a step (``.../step-00000100``) or a store, whose newest step is read (or is corrupt).
    ``patterns`` are those of fnmatch on dotted names. Each tensor is compared with its digests before it
    is yielded, and nothing is kept of it: memory is one tensor, and one chunk where ranks cut it along
    another dim than the first.

    Raises CorruptCheckpoint for damaged bytes, ValueError for a path without a checkpoint and for
    patterns that match nothing.
    """
    with SavedTensors(path) as saved:
        names = saved.names(patterns)
        if not names:
            first = next(iter(saved.table.tensors), "none at all")
            rule, fix = f"match no tensor of {saved.path}", f"use names like {first!r}"
            raise invalid("patterns", "unmatched", list(patterns), rule, fix)
        for name in names:
            yield name, saved.read(name)


class SavedTensors:
    """A checkpoint held open for reads of single tensors and objects, in any order.

        with SavedTensors("runs/a/checkpoints") as saved:
            weight, position = saved.read("model.embedding.weight"), saved.read_object("loader")

    ``path`` as in :func:`read_tensors`; the manifest is verified when this is made, a tensor when it is
    read. Nothing is locked or moved: the writer may be at work. Raises CorruptCheckpoint, and ValueError for a
    path without a checkpoint.
    """

    def __init__(self, path: str | os.PathLike[str], threads: int = 2) -> None:
        self.path = step_path(user_path(path))
        self._threads = threads
        self._last = LastBlock()
        self._reader = ForgeReader(self.path)
        self.table: Manifest = self._reader.open()

    @property
    def step(self) -> int | None:
        """The step of the checkpoint."""
        return self.table.step

    @property
    def digest(self) -> str:
        """The sha256 of the manifest, which holds the digests of all blocks: that of the whole checkpoint."""
        return manifest.digest_of(self._reader.directory)

    def keys(self) -> list[str]:
        """The names of the state that was saved, such as "model"."""
        return list(dict.fromkeys(str(path[0]) for path in self.table.paths().values()))

    def below(self, key: str) -> dict[str, Tensor]:
        """The tensors below a name of the state, on the meta device, by the names that they have there."""
        return {short: self.meta(name) for short, name in self.table.tensors_below(key).items()}

    def names(self, patterns: Sequence[str] = ("*",)) -> list[str]:
        """The saved tensors whose name matches one of ``patterns``."""
        return [n for n in self.table.tensors if any(fnmatchcase(n, p) for p in patterns)]

    def meta(self, name: str) -> Tensor:
        """The tensor on the meta device: its shape and dtype."""
        entry = self.table.tensors[name]
        return torch.empty(entry.shape, dtype=entry.dtype, device="meta")

    def read(self, name: str) -> Tensor:
        """The full tensor on the CPU, verified; raises CorruptCheckpoint and KeyError."""
        shape = self.table.tensors[name].shape
        return self.read_box(name, [0] * len(shape), shape)

    def read_box(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """A box of the tensor, verified, for tools such as `cat` and `reshard`: only the blocks that it touches are read."""
        entry = self.table.tensors[name]
        box = torch.empty(tuple(sizes), dtype=entry.dtype)
        in_place: list[Segment] = []
        for chunk in entry.chunks:
            low = [max(o, c) for o, c in zip(offsets, chunk.offsets, strict=True)]
            ends = zip(offsets, sizes, chunk.offsets, chunk.sizes, strict=True)
            high = [min(o + s, c + n) for o, s, c, n in ends]
            if not all(a < b for a, b in zip(low, high)):
                continue

            begin = [a - c for a, c in zip(low, chunk.offsets)]
            lengths = [b - a for a, b in zip(low, high)]
            span, _, strides = box_span(chunk, entry.dtype, begin, lengths)
            target = box[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offsets))]
            if target.is_contiguous() and target.nbytes == span.length:
                in_place.append(Segment(span.file, span.start, byte_view(target)))
            else:  # cut along another dim than the first: one such chunk at a time is in memory
                memory = torch.empty(span.length // entry.dtype.itemsize, dtype=entry.dtype)
                self._read([Segment(span.file, span.start, byte_view(memory))])
                target.copy_(memory.as_strided(tuple(lengths), strides))
        self._read(in_place)
        return box

    def read_object(self, name: str) -> Any:
        """A saved object; raises KeyError, and ValueError where it cannot be decoded."""
        return codec.decode(self.table.objects[name].value)

    def _read(self, segments: list[Segment]) -> None:
        read_segments(self._reader.directory, self.table, segments, self._threads, self._last)

    def __enter__(self) -> "SavedTensors":
        return self

    def __exit__(self, *error: object) -> None:
        self._reader.close()


def step_path(path: Path) -> Path:
    """``path`` if it is a step, else the newest step of the store there, whether it is sound or not."""
    if (path / manifest.NAME).is_file():
        return path
    if not path.is_dir():
        fix = "give a checkpoint (step-...) or a store of them"
        raise invalid("path", "not_found", str(path), "is not a directory", fix)
    refuse_foreign(path)
    newest = directories.newest_step(path)
    if newest is None:
        rule, fix = "holds no checkpoint", "give a store that was saved to"
        raise invalid("path", "empty", str(path), rule, fix)
    return directories.step_directory(path, newest)
