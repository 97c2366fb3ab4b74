"""The storage reader for dcp.load: verify everything, then fill the tensors.

Large tensors are read twice: into a scratch block that is verified, and from the page cache into the
tensor. So they need no staging memory, whose page faults take longer than the second read (here a GB:
0.38 s to read into fresh memory and 0.07 s to copy; 0.04 s into a scratch block and 0.06 s into a tensor).
"""

import contextlib
import io
import math
import os
from collections.abc import Callable, Container, Iterator, Sequence
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

from forge_ckpt import codec, files, manifest
from forge_ckpt._shared.file_bytes import byte_view
from forge_ckpt._shared.paths import user_path
from forge_ckpt._shared.problems import invalid
from forge_ckpt.directories import refuse_foreign
from forge_ckpt.errors import CheckpointMismatch, one_line, restated
from forge_ckpt.read.blocks import Segment, read_segments
from forge_ckpt.read.memory import Arena, Span, check_shared_memory, names_in_shared_memory
from forge_ckpt.read.planner import ForgeLoadPlanner

# Bytes from which a tensor is read without staging memory; smaller ones are staged, many in one read.
_LARGE = 2**18


class Staged(NamedTuple):
    """What is verified and not yet in the caller's tensors."""

    # A box and its content on the CPU, which is copied only after all is verified.
    in_memory: list[tuple[ReadItem, torch.Tensor]]
    # A box and its tensor, large enough to skip staging memory: ``read`` fills it in place.
    direct: list[tuple[ReadItem, torch.Tensor]]
    read: Callable[[], None]


class ForgeReader(StorageReader):
    """For ``dcp.load(state, storage_reader=ForgeReader(path), planner=ForgeLoadPlanner())``.

    All blocks that ``state`` needs are verified before the first of its tensors changes. With ``step``, the
    manifest must be of that step.

    Cost: each touched block of 4 MiB is read and digested once. A contiguous CPU tensor of 256 KiB or more
    is then read once more, from the page cache. All other tensors that are filled in place take host memory
    of their size; on file systems without cached reads (``RWF_NOWAIT``: most network file systems) all do.
    The second read gets the verified bytes, or verifies again what has left the page cache or changed; if that
    is damaged, it raises CorruptCheckpoint with tensors partly filled (:func:`forge_ckpt.read.blocks.read_segments`).

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
        """Verify and decode all items of ``plan``; the state does not change yet.

        :func:`fill` takes the result, before this reader is closed. The planner holds the replaced leaves.
        """
        table = self.open()
        boxes = _boxes(table, plan)
        unstaged = self._unstaged(boxes, planner)
        staged = [box for i, box in enumerate(boxes) if i not in unstaged]

        arena = Arena([box.span for box in staged])
        segments = [
            Segment(boxes[i].span.file, boxes[i].span.start, byte_view(target), deferred)
            for i, (target, deferred) in unstaged.items()
        ]
        read = read_segments(self.directory, table, [*segments, *arena.segments], self.threads)
        for item in plan.items:  # decoding may raise, so no tensor has been filled yet
            if item.type == LoadItemType.BYTE_IO:
                self._decode(table, item, planner)

        in_place: list[tuple[ReadItem, torch.Tensor]] = []
        for i, box in enumerate(staged):
            source = arena.span(i, box.dtype).as_strided(tuple(box.item.lengths), box.strides)
            if planner.is_replaced(box.item):
                _copy(box.item, source, planner)
            else:
                in_place.append((box.item, source))
        check_shared_memory(in_place, planner, str(self.path))
        direct = [(boxes[i].item, target) for i, (target, deferred) in unstaged.items() if deferred]
        return Staged(in_place, direct, read)

    def _unstaged(
        self, boxes: list["_Box"], planner: ForgeLoadPlanner
    ) -> dict[int, tuple[torch.Tensor, bool]]:
        """{index: (tensor, whether it is the caller's)} of the boxes that need no staging memory.

        A leaf made for this load is read at once: if it fails, no caller sees the leaf.
        """
        large = [i for i, box in enumerate(boxes) if box.span.length >= _LARGE]
        old = [box.item for box in boxes if not planner.is_replaced(box.item)] if large else []
        if old and not self.directory.has_cached_reads(boxes[large[0]].span.file):
            large = [i for i in large if planner.is_replaced(boxes[i].item)]
            old = []

        shared = names_in_shared_memory(old, planner)
        found = {}
        for i in large:
            box = boxes[i]
            target = planner.resolve_tensor(box.item).detach()
            if box.item.dest_index.fqn not in shared and _is_raw(target, box):
                found[i] = target, not planner.is_replaced(box.item)
        return found

    def _decode(self, table: manifest.Manifest, item: ReadItem, planner: ForgeLoadPlanner) -> None:
        """Hand an object of the manifest to the planner; raises CorruptCheckpoint if it cannot be decoded."""
        name = item.storage_index.fqn
        try:
            text = codec.dumps(table.objects[name].value)
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
    """Fill the caller's tensors, free the staging memory, and replace the other leaves."""
    with torch.no_grad():
        for item, source in staged.in_memory:
            _copy(item, source, planner)
    staged.in_memory.clear()
    staged.read()
    for item, target in staged.direct:
        torch.autograd.graph.increment_version(target)  # autograd sees no read into memory
        planner.commit_tensor(item, target)
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
    """The boxes of the tensors that ``plan`` reads."""
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
        boxes.append(_Box(item, *box_span(chunk, dtype, item.storage_offsets, item.lengths)))
    return boxes


def box_span(
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


def _is_raw(target: torch.Tensor, box: _Box) -> bool:
    """Whether the bytes of ``target`` are the box's bytes in the file."""
    return (
        type(target) is torch.Tensor
        and target.device.type == "cpu"
        and target.dtype == box.dtype
        and target.is_contiguous()
        and target.nbytes == box.span.length
        and not (target.is_inference() or target.is_conj() or target.is_neg())
    )
