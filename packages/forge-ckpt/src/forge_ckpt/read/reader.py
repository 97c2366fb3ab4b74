"""The storage reader behind dcp.load: read and verify into staging memory, then hand over."""

import contextlib
import io
import math
import os
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from forge_ckpt import files, manifest, objects
from forge_ckpt.errors import CheckpointMismatch, CorruptCheckpoint
from forge_ckpt.foreign import refuse_foreign
from forge_ckpt.read.blocks import Segment, read_segments
from forge_ckpt.read.planner import ForgeLoadPlanner
from forge_ckpt.read.shared import refuse_different_bytes

Staged = list[tuple[ReadItem, torch.Tensor]]  # a wanted box and its verified content, on the CPU


class ForgeReader(StorageReader):
    """For ``dcp.load(state, storage_reader=ForgeReader(path), planner=ForgeLoadPlanner())``.

    All blocks that ``state`` needs are verified before the first of its tensors changes. Cost: host
    memory for what this rank loads, beside the tensors themselves; each touched 4 MiB block is read
    and digested once. With ``step``, the manifest must be of that step.

    Raises CorruptCheckpoint; through ``dcp.load`` it arrives inside torch's CheckpointException.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, step: int | None = None, threads: int = 2
    ) -> None:
        self.path = Path(path)
        self.step = step
        self.threads = threads
        self._directory: files.Directory | None = None
        self._manifest: manifest.Manifest | None = None

    def use(self, directory: files.Directory, table: manifest.Manifest) -> None:
        """Read from ``directory``, held open, with a manifest that was verified elsewhere."""
        self.close()
        self._directory, self._manifest = directory, table

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new load begins; ``checkpoint_id``, if given, is its path."""
        if checkpoint_id is not None:
            self.close()
            self.path = Path(checkpoint_id)

    def open(self) -> manifest.Manifest:
        """The verified manifest, read once. Raises as :func:`forge_ckpt.manifest.read`, and
        ValueError for a checkpoint of another format."""
        if self._manifest is None:
            if not (self.path / manifest.NAME).exists():
                refuse_foreign(self.path)
            self._directory = files.Directory(self.path)
            self._manifest = manifest.read(self._directory, self.step)
        return self._manifest

    @contextlib.contextmanager
    def opened(self) -> Iterator[manifest.Manifest]:
        """:meth:`open` for a ``with`` block, closed at its end."""
        try:
            yield self.open()
        finally:
            self.close()

    def close(self) -> None:
        """Let go of the directory; the next call opens it again."""
        if self._directory is not None:
            self._directory.close()
        self._directory = self._manifest = None

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """The table in torch's terms."""
        return metadata_of(self.open())

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """The manifest is already read."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Torch's plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Torch's plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Stage and verify everything, then fill tensors and objects."""
        if not isinstance(planner, ForgeLoadPlanner):
            raise ValueError(
                f"planner {type(planner).__name__} would unpickle objects; pass ForgeLoadPlanner()"
            )
        fill(self.stage(plan, planner), planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def stage(self, plan: LoadPlan, planner: ForgeLoadPlanner) -> Staged:
        """Read, verify and decode all that ``plan`` asks for; nothing of the state changes yet.

        Returns what goes into the caller's tensors; the planner has the rest.
        """
        table = self.open()
        assert self._directory is not None
        tensors = [item for item in plan.items if item.type == LoadItemType.TENSOR]
        staged = [_stage(table, item) for item in tensors]
        read_segments(self._directory, table, [segment for _, segment in staged], self.threads)
        for item in plan.items:  # decoding can refuse, so it comes before the first tensor
            if item.type == LoadItemType.BYTE_IO:
                self._decode(table, item, planner)
        live: Staged = []
        for item, (source, _) in zip(tensors, staged):
            if planner.is_new(item):
                _copy(item, source, planner)
            else:
                live.append((item, source))
        refuse_different_bytes(live, planner, str(self.path))
        return live

    def _decode(self, table: manifest.Manifest, item: ReadItem, planner: ForgeLoadPlanner) -> None:
        name = item.storage_index.fqn
        try:
            text = objects.dumps(table.objects[name].value)
            planner.load_bytes(item, io.BytesIO(text.encode()))
        except CheckpointMismatch:
            raise
        except (ValueError, RecursionError) as error:
            raise CorruptCheckpoint(
                f"{self.path / manifest.NAME}: object {name:.80} cannot be used ({error})"
            ) from error

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any path that is not a URL."""
        return "://" not in os.fspath(checkpoint_id)


def fill(staged: Staged, planner: ForgeLoadPlanner) -> None:
    """Copy what was staged into the caller's tensors and put the decoded objects in their places."""
    with torch.no_grad():
        for item, source in staged:
            _copy(item, source, planner)
    planner.finish_read()


def _copy(item: ReadItem, source: torch.Tensor, planner: ForgeLoadPlanner) -> None:
    target = planner.resolve_tensor(item).detach()
    assert target.size() == source.size(), (item, target.size())
    target.copy_(source)
    planner.commit_tensor(item, target)


def metadata_of(table: manifest.Manifest, without: Container[str] = ()) -> Metadata:
    """A manifest in torch's terms, names in ``without`` left out."""
    found: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for name, entry in table.tensors.items():
        boxes = [
            ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
            for chunk in entry.chunks
        ]
        properties = TensorProperties(dtype=entry.dtype)
        found[name] = TensorStorageMetadata(properties, torch.Size(entry.shape), boxes)
    found |= {name: BytesStorageMetadata() for name in table.objects}
    kept = {name: entry for name, entry in found.items() if name not in without}
    paths = {name: path for name, path in table.paths().items() if name in kept}
    return Metadata(kept, planner_data=paths)


def _stage(table: manifest.Manifest, item: ReadItem) -> tuple[torch.Tensor, Segment]:
    """Memory for one wanted box of one chunk, and the bytes of the file that fill it.

    The box may be any part of the chunk: what is read is the span from its first to its last
    element, and the tensor is a strided view of that.
    """
    name, offset = item.storage_index.fqn, tuple(item.storage_index.offset or ())
    entry = table.tensors[name]
    chunk = next(c for c in entry.chunks if c.offsets == offset)
    strides = [math.prod(chunk.sizes[dim + 1 :]) for dim in range(len(chunk.sizes))]
    first = sum(o * s for o, s in zip(item.storage_offsets, strides))
    count = 1 + sum((n - 1) * s for n, s in zip(item.lengths, strides))
    memory = torch.empty(count, dtype=entry.dtype)
    start = chunk.start + first * entry.dtype.itemsize
    segment = Segment(chunk.file, start, files.byte_view(memory))
    return memory.as_strided(tuple(item.lengths), strides), segment
