"""Committed checkpoints: the storage writer of dcp.save, and a checkpoint that one process writes box by box."""

import dataclasses
import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from forge_ckpt import codec, directories, manifest
from forge_ckpt._shared.file_bytes import byte_view
from forge_ckpt._shared.paths import user_path
from forge_ckpt._shared.problems import invalid
from forge_ckpt.directories import Lock, refuse_foreign
from forge_ckpt.errors import StepExists
from forge_ckpt.manifest import Chunk, FileEntry, Manifest, ObjectEntry, TensorEntry
from forge_ckpt.write.blocks import BlockFile
from forge_ckpt.write.planner import FileLayout, ForgeSavePlanner, lay_out
from forge_ckpt.write.staging import host_views

_Location = tuple[str, int, int]  # file, start, length: the last fields of a Chunk, in its order


class ForgeWriter(StorageWriter):
    """For ``dcp.save(state, storage_writer=ForgeWriter(path, step=100), planner=ForgeSavePlanner())``.

    Each rank writes ``data-<rank>.bin`` into ``<path>.tmp-<random>``, on a file system that all ranks
    share. When all are written, one rename to ``path`` makes the checkpoint visible, complete and
    durable. A failed save leaves the temporary directory; ``discard`` removes it.

    Memory: ``2 * threads + 1`` blocks of 4 MiB, and one tensor where it is not contiguous or not on
    the CPU. ``metrics`` are numbers of the step for the manifest. Raises StepExists when ``path``
    exists, and ValueError for a ``digest`` that is not here (see
    :func:`forge_ckpt.codec.digest_function`).
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        step: int | None = None,
        threads: int = 2,
        digest: str = codec.DEFAULT_DIGEST,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        codec.digest_function(digest)
        self.digest = digest
        self.metrics = dict(metrics or {})
        self.path = user_path(path)
        self.step = step
        self.threads = threads
        self._temporary: Path | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save, to ``checkpoint_id`` if it is given."""
        if checkpoint_id is not None:
            self.path = user_path(checkpoint_id)
        self._temporary = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the directory is made in ``prepare_global_plan``, after all ranks have planned."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the temporary directory (coordinator only); each plan carries its name and a rank number."""
        name = self.make_directory()
        return [
            dataclasses.replace(plan, storage_data=(name, rank)) for rank, plan in enumerate(plans)
        ]

    def make_directory(self) -> str:
        """Make the temporary directory (coordinator only) and return its name."""
        if os.path.lexists(self.path):
            fix = "give a new one: a checkpoint is never written in place"
            raise invalid("path", "exists", str(self.path), "exists", fix, kind=StepExists)
        directories.make_directory(self.path.parent)
        name = f"{self.path.name}.tmp-{secrets.token_hex(4)}"
        self._temporary = self.path.parent / name
        self._temporary.mkdir()
        return name

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors; objects and digests go to the coordinator as write results."""
        future: Future[list[WriteResult]] = Future()
        future.set_result(self.write_layout(self.layout(plan, planner)))
        return future

    def layout(self, plan: SavePlan, planner: SavePlanner) -> FileLayout:
        """The layout of this rank's file. Raises ValueError for a planner that pickles."""
        if not isinstance(planner, ForgeSavePlanner):
            shown, fix = type(planner).__name__, "pass ForgeSavePlanner()"
            raise invalid("planner", "type", shown, "would pickle objects", fix)
        name, rank = plan.storage_data
        self._temporary = self.path.parent / name
        return lay_out(plan, planner, f"data-{rank}.bin")

    def write_layout(
        self, layout: FileLayout, staged: memoryview | None = None
    ) -> list[WriteResult]:
        """Write and sync the file of ``layout``, from the bytes ``staged`` or else from the tensors."""
        assert self._temporary is not None, "layout() names the directory"
        block_file = BlockFile(self._temporary / layout.file, self.threads, self.digest)
        try:
            if staged is not None:
                block_file.append_staged(staged)
            else:
                for view, piece in zip(host_views(layout), layout.pieces):
                    start = block_file.append(view)
                    assert start == piece.start, (start, piece.start)
            entry = block_file.finish()
        finally:
            block_file.close()
        return [*layout.results, WriteResult(MetadataIndex(layout.file), entry.size, entry)]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit, on the coordinator only, after every rank has written and synced its file."""
        assert self._temporary is not None, "torch calls prepare_global_plan first"
        table = _manifest(self.step, metadata, [result for rank in results for result in rank])
        table = dataclasses.replace(table, digest=self.digest, metrics=self.metrics)
        directories.seal(self._temporary, table, self.path)
        self._temporary = None

    def discard(self) -> None:
        """Remove the temporary directory of a failed save; does nothing after a commit."""
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Accept any path that is not a URL."""
        return "://" not in os.fspath(checkpoint_id)


def _manifest(step: int | None, metadata: Metadata, results: Sequence[WriteResult]) -> Manifest:
    """The manifest of what all ranks have written."""
    file_entries: dict[str, FileEntry] = {}
    texts: dict[str, str] = {}
    locations: dict[tuple[str, tuple[int, ...]], _Location] = {}
    for result in results:
        fqn, offset, data = result.index.fqn, result.index.offset, result.storage_data
        if isinstance(data, FileEntry):
            file_entries[fqn] = data
        elif isinstance(data, str):
            texts[fqn] = data
        else:
            locations[fqn, tuple(offset or ())] = data

    tensors: dict[str, TensorEntry] = {}
    object_entries: dict[str, ObjectEntry] = {}
    for name, entry in metadata.state_dict_metadata.items():
        path = metadata.planner_data[name]

        if isinstance(entry, TensorStorageMetadata):
            chunks = tuple(
                Chunk(tuple(c.offsets), tuple(c.sizes), *locations[name, tuple(c.offsets)])
                for c in entry.chunks
                if math.prod(c.sizes)  # uneven sharding leaves some ranks without elements
            )
            tensors[name] = TensorEntry(path, tuple(entry.size), entry.properties.dtype, chunks)
        else:
            object_entries[name] = ObjectEntry(path, json.loads(texts[name]))
    return Manifest(step, torch.__version__, file_entries, tensors, object_entries)


@dataclass(frozen=True)
class Box:
    """``data``, a dense CPU tensor, at ``offsets`` of the tensor ``path`` of ``shape``."""

    path: codec.Path
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    data: torch.Tensor

    @staticmethod
    def whole(path: codec.Path, data: torch.Tensor) -> "Box":
        return Box(path, tuple(data.shape), (0,) * data.dim(), data)


def write_checkpoint(
    store: Path,
    step: int,
    contents: Iterable[Iterable[Box]],
    objects: Mapping[str, ObjectEntry],
    digest: str = codec.DEFAULT_DIGEST,
    progress: Callable[[int], None] = lambda done: None,
) -> Path:
    """Commit ``step`` to the store at ``store`` and return its directory.

    ``contents`` has the boxes of each file in the order of the bytes; a box is freed when it is
    written, so memory is one box and 5 blocks of 4 MiB. The store is locked meanwhile. ``progress`` gets
    the bytes written so far. Raises StepExists if it has the step or a newer one, and CorruptCheckpoint, before the
    commit, for boxes that do not tile their tensors.
    """
    directories.make_directory(store)
    refuse_foreign(store)
    lock = Lock(store)
    target = directories.step_directory(store, step)
    temporary = store / f"{target.name}.tmp-{secrets.token_hex(4)}"
    try:
        newest = directories.newest_step(store)
        if newest is not None and step <= newest:
            rule = f"must be above {newest}, the newest in {store}"
            fix = "write into another directory"
            raise invalid("step", "order", step, rule, fix, kind=StepExists)
        temporary.mkdir()
        file_entries: dict[str, FileEntry] = {}
        tensors: dict[str, TensorEntry] = {}
        done = 0

        def counted(boxes: Iterable[Box]) -> Iterator[Box]:
            nonlocal done
            for box in boxes:
                done += box.data.nbytes
                yield box
                del box  # or it would live while the next one is made
                progress(done)

        for number, boxes in enumerate(contents):
            name = f"data-{number}.bin"
            file_entries[name] = _write_file(temporary / name, counted(boxes), tensors, digest)
        named = dict(objects)
        table = Manifest(step, torch.__version__, file_entries, tensors, named, digest=digest)
        manifest.decode(manifest.encode(table), str(target / manifest.NAME))
        directories.seal(temporary, table, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        lock.release()
    return target


def _write_file(
    path: Path, boxes: Iterable[Box], tensors: dict[str, TensorEntry], digest: str
) -> FileEntry:
    """Write boxes to a new file, and add their chunks to ``tensors``."""
    block_file = BlockFile(path, 2, digest)
    try:
        for box in boxes:
            data = box.data.contiguous()
            name = codec.dotted_name(box.path)
            entry = TensorEntry(box.path, box.shape, data.dtype, ())
            known = tensors.setdefault(name, entry)
            if (known.path, known.shape, known.dtype) != (entry.path, entry.shape, entry.dtype):
                rule = "is the name of two tensors"
                raise invalid(name, "duplicate", ..., rule, "leave one of them out")

            if data.numel():
                view = byte_view(data)
                start = block_file.append(view)
                chunk = Chunk(box.offsets, tuple(data.shape), path.name, start, len(view))
                tensors[name] = TensorEntry(
                    known.path, known.shape, known.dtype, (*known.chunks, chunk)
                )
            del box, data  # or they would live while the next box is made
        return block_file.finish()
    finally:
        block_file.close()
