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
from forge_ckpt.manifest import Chunk, Manifest, TensorEntry
from forge_ckpt.read.blocks import LastBlock, Segment, read_segments
from forge_ckpt.read.reader import ForgeReader, stage_box


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
        return {
            name.removeprefix(f"{key}."): self.meta(name)
            for name, entry in self.table.tensors.items()
            if entry.path[0] == key
        }

    def names(self, patterns: Sequence[str] = ("*",)) -> list[str]:
        """The saved tensors whose name matches one of ``patterns``."""
        return [n for n in self.table.tensors if any(fnmatchcase(n, p) for p in patterns)]

    def meta(self, name: str) -> Tensor:
        """The tensor on the meta device: its shape and dtype."""
        entry = self.table.tensors[name]
        return torch.empty(entry.shape, dtype=entry.dtype, device="meta")

    def read(self, name: str) -> Tensor:
        """The whole tensor on the CPU, verified; raises CorruptCheckpoint and KeyError."""
        entry = self.table.tensors[name]
        whole = torch.empty(entry.shape, dtype=entry.dtype)
        inside = [chunk for chunk in entry.chunks if _is_contiguous(chunk, entry)]
        flat = byte_view(whole)
        self._fill(
            [(chunk, flat[(at := _start(chunk, entry)) : at + chunk.length]) for chunk in inside]
        )
        for chunk in entry.chunks:
            if chunk not in inside:
                box = torch.empty(chunk.sizes, dtype=entry.dtype)
                self._fill([(chunk, byte_view(box))])
                where = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes))
                whole[where] = box
        return whole

    def read_box(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """A part of the tensor, verified: only the blocks that it touches are read."""
        entry = self.table.tensors[name]
        box = torch.empty(tuple(sizes), dtype=entry.dtype)
        parts: list[tuple[tuple[slice, ...], Tensor]] = []
        segments: list[Segment] = []

        for chunk in entry.chunks:
            low = [max(o, c) for o, c in zip(offsets, chunk.offsets)]
            high = [
                min(o + s, c + n)
                for o, s, c, n in zip(offsets, sizes, chunk.offsets, chunk.sizes, strict=True)
            ]
            if all(a < b for a, b in zip(low, high)):
                begin = [a - c for a, c in zip(low, chunk.offsets)]
                lengths = [b - a for a, b in zip(low, high)]
                part, segment = stage_box(chunk, entry.dtype, begin, lengths)
                parts.append(
                    (tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offsets)), part)
                )
                segments.append(segment)

        read_segments(self._reader.directory, self.table, segments, self._threads, self._last)
        for where, part in parts:
            box[where] = part
        return box

    def read_object(self, name: str) -> Any:
        """A saved object; raises KeyError, and ValueError where it cannot be decoded."""
        return codec.decode(self.table.objects[name].value)

    def _fill(self, chunks: list[tuple[Chunk, memoryview]]) -> None:
        segments = [Segment(chunk.file, chunk.start, view) for chunk, view in chunks]
        read_segments(self._reader.directory, self.table, segments, self._threads, self._last)

    def __enter__(self) -> "SavedTensors":
        return self

    def __exit__(self, *error: object) -> None:
        self._reader.close()


def _is_contiguous(chunk: Chunk, entry: TensorEntry) -> bool:
    """Whether its elements follow each other in the whole tensor: only the first dim with more than one
    index is cut."""
    first = next((dim for dim, size in enumerate(chunk.sizes) if size > 1), len(chunk.sizes))
    return chunk.sizes[first + 1 :] == entry.shape[first + 1 :]


def _start(chunk: Chunk, entry: TensorEntry) -> int:
    """The byte of the whole tensor at which the chunk's first element is."""
    position = 0
    for offset, size in zip(chunk.offsets, entry.shape):
        position = position * size + offset
    return position * entry.dtype.itemsize


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
