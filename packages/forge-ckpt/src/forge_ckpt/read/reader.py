"""The storage reader for dcp.load: read and verify into staging memory, then fill the tensors."""

import contextlib
import io
import math
import os
from collections.abc import Container, Iterator, Sequence
from typing import Any, NamedTuple

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
from forge_ckpt._shared.paths import user_path
from forge_ckpt._shared.problems import invalid
from forge_ckpt.errors import CheckpointMismatch, one_line, restated
from forge_ckpt.foreign import refuse_foreign
from forge_ckpt.read.arena import Arena, Span
from forge_ckpt.read.blocks import Segment, read_segments
from forge_ckpt.read.planner import ForgeLoadPlanner
from forge_ckpt.read.shared_memory import check_shared_memory

Staged = list[tuple[ReadItem, torch.Tensor]]  # a box to fill and its verified content, on the CPU


class ForgeReader(StorageReader):
    """For ``dcp.load(state, storage_reader=ForgeReader(path), planner=ForgeLoadPlanner())``.

    All blocks that ``state`` needs are verified before the first of its tensors changes. Cost: host
    memory of the size that this rank fills in place, in addition to the tensors (other leaves are read
    into their own memory); each touched 4 MiB block is read and digested once. With ``step``, the manifest must be of that step.

    Raises CorruptCheckpoint; ``dcp.load`` wraps it in torch's CheckpointException.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, step: int | None = None, threads: int = 2
    ) -> None:
        self.path = user_path(path)
        self.step = step
        self.threads = threads
        self._directory: files.Directory | None = None
        self._manifest: manifest.Manifest | None = None

    def use(self, directory: files.Directory, table: manifest.Manifest) -> None:
        """Read from the open ``directory``, whose verified manifest is ``table``."""
        self.close()
        self._directory, self._manifest = directory, table

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new load, from ``checkpoint_id`` if it is given."""
        if checkpoint_id is not None:
            self.close()
            self.path = user_path(checkpoint_id)

    def open(self) -> manifest.Manifest:
        """The verified manifest, read once. Raises as :func:`forge_ckpt.manifest.read`, and
        ValueError for a checkpoint of another format."""
        if self._manifest is None:
            if not (self.path / manifest.NAME).exists():
                refuse_foreign(self.path)
            self._directory = files.Directory(self.path)
            self._manifest = manifest.read(self._directory, self.step)
        return self._manifest

    @property
    def directory(self) -> files.Directory:
        """The open directory."""
        self.open()
        assert self._directory is not None
        return self._directory

    @contextlib.contextmanager
    def opened(self) -> Iterator[manifest.Manifest]:
        """:meth:`open` for a ``with`` block, closed at its end."""
        try:
            yield self.open()
        finally:
            self.close()

    def close(self) -> None:
        """Close the directory; the next call opens it again."""
        if self._directory is not None:
            self._directory.close()
        self._directory = self._manifest = None

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """The manifest as torch's Metadata."""
        return metadata_of(self.open())

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing to do: ``read_metadata`` has read the manifest."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Stage and verify everything, then fill tensors and objects."""
        if not isinstance(planner, ForgeLoadPlanner):
            shown, fix = type(planner).__name__, "pass ForgeLoadPlanner()"
            raise invalid("planner", "type", shown, "would unpickle objects", fix)
        fill(self.stage(plan, planner), planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def stage(self, plan: LoadPlan, planner: ForgeLoadPlanner) -> Staged:
        """Read, verify and decode all items of ``plan``; the state does not change yet.

        Returns the content of the caller's tensors; the planner holds the replaced leaves.
        """
        table = self.open()
        boxes = _boxes(table, plan)
        direct = {i: found for i, box in enumerate(boxes) if (found := _unstaged(box, planner))}
        staged = [box for i, box in enumerate(boxes) if i not in direct]
        arena = Arena([box.span for box in staged])
        read_segments(self.directory, table, [*direct.values(), *arena.segments], self.threads)
        for item in plan.items:  # decoding may raise, so no tensor has been filled yet
            if item.type == LoadItemType.BYTE_IO:
                self._decode(table, item, planner)
        in_place: Staged = []
        for i, box in enumerate(staged):
            source = arena.span(i, box.dtype).as_strided(tuple(box.item.lengths), box.strides)
            if planner.is_replaced(box.item):
                _copy(box.item, source, planner)
            else:
                in_place.append((box.item, source))
        check_shared_memory(in_place, planner, str(self.path))
        return in_place

    def _decode(self, table: manifest.Manifest, item: ReadItem, planner: ForgeLoadPlanner) -> None:
        name = item.storage_index.fqn
        try:
            text = objects.dumps(table.objects[name].value)
            planner.load_bytes(item, io.BytesIO(text.encode()))
        except CheckpointMismatch:
            raise
        except (ValueError, RecursionError) as error:
            shown = f"object {one_line(name[:80])} cannot be used"
            raise restated(error, f"{self.path / manifest.NAME}: {shown}") from error

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Accept any path that is not a URL."""
        return "://" not in os.fspath(checkpoint_id)


def fill(staged: Staged, planner: ForgeLoadPlanner) -> None:
    """Copy the staged content into the caller's tensors, free it, and replace the other leaves."""
    with torch.no_grad():
        for item, source in staged:
            _copy(item, source, planner)
    staged.clear()
    planner.finish_read()


def _copy(item: ReadItem, source: torch.Tensor, planner: ForgeLoadPlanner) -> None:
    target = planner.resolve_tensor(item).detach()
    assert target.size() == source.size(), (item, target.size())
    target.copy_(source)
    planner.commit_tensor(item, target)


def metadata_of(table: manifest.Manifest, without: Container[str] = ()) -> Metadata:
    """A manifest as torch's Metadata, without the names in ``without``."""
    found: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for name, entry in table.tensors.items():
        boxes = [
            ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
            for chunk in entry.chunks
        ]
        properties = TensorProperties(dtype=entry.dtype)
        found[name] = TensorStorageMetadata(properties, torch.Size(entry.shape), boxes)
    found |= {name: BytesStorageMetadata() for name in table.objects}
    entries = {name: entry for name, entry in found.items() if name not in without}
    paths = {name: path for name, path in table.paths().items() if name in entries}
    return Metadata(entries, planner_data=paths)


class _Box(NamedTuple):
    """A box of one saved chunk, a strided view of ``span``."""

    item: ReadItem
    span: Span
    dtype: torch.dtype
    strides: list[int]


def _boxes(table: manifest.Manifest, plan: LoadPlan) -> list[_Box]:
    items = [item for item in plan.items if item.type == LoadItemType.TENSOR]
    names = {item.storage_index.fqn for item in items}
    chunks = {
        (name, chunk.offsets): chunk for name in names for chunk in table.tensors[name].chunks
    }
    boxes = []
    for item in items:
        name = item.storage_index.fqn
        chunk = chunks[name, tuple(item.storage_index.offset or ())]
        dtype = table.tensors[name].dtype
        boxes.append(_Box(item, *_span(chunk, dtype, item.storage_offsets, item.lengths)))
    return boxes


def _span(
    chunk: manifest.Chunk, dtype: torch.dtype, begin: Sequence[int], lengths: Sequence[int]
) -> tuple[Span, torch.dtype, list[int]]:
    """The bytes from the first to the last element of a box of a chunk, and the strides of the box there.

    The box may be any part of the chunk: one read instead of one for each row.
    """
    strides = [math.prod(chunk.sizes[dim + 1 :]) for dim in range(len(chunk.sizes))]
    first = sum(o * s for o, s in zip(begin, strides))
    count = 1 + sum((n - 1) * s for n, s in zip(lengths, strides))
    span = Span(chunk.file, chunk.start + first * dtype.itemsize, count * dtype.itemsize)
    return span, dtype, strides


def stage_box(
    chunk: manifest.Chunk, dtype: torch.dtype, begin: Sequence[int], lengths: Sequence[int]
) -> tuple[torch.Tensor, Segment]:
    """Memory for a box of a chunk, from ``begin`` in it, and the segment of the file that fills it."""
    span, _, strides = _span(chunk, dtype, begin, lengths)
    memory = torch.empty(span.length // dtype.itemsize, dtype=dtype)
    segment = Segment(span.file, span.start, files.byte_view(memory))
    return memory.as_strided(tuple(lengths), strides), segment


def _unstaged(box: _Box, planner: ForgeLoadPlanner) -> Segment | None:
    """The segment that fills a large leaf made for this load: if it fails, nobody sees the leaf."""
    if box.span.length < manifest.BLOCK_BYTES or not planner.is_replaced(box.item):
        return None
    target = planner.resolve_tensor(box.item)
    if not target.is_contiguous() or target.nbytes != box.span.length:
        return None
    return Segment(box.span.file, box.span.start, files.byte_view(target))
