"""A checkpoint written box by box by one process, for tools that never hold a whole state."""

import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from forge_ckpt import digests, directories, manifest, tree
from forge_ckpt._shared.file_bytes import byte_view
from forge_ckpt._shared.problems import invalid
from forge_ckpt.errors import StepExists
from forge_ckpt.foreign import refuse_foreign
from forge_ckpt.lock import Lock
from forge_ckpt.manifest import Chunk, FileEntry, Manifest, ObjectEntry, TensorEntry
from forge_ckpt.write.blocks import BlockFile


@dataclass(frozen=True)
class Box:
    """``data``, a dense CPU tensor, at ``offsets`` of the tensor ``path`` of ``shape``."""

    path: tree.Path
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    data: torch.Tensor

    @staticmethod
    def whole(path: tree.Path, data: torch.Tensor) -> "Box":
        return Box(path, tuple(data.shape), (0,) * data.dim(), data)


def write_checkpoint(
    store: Path,
    step: int,
    contents: Iterable[Iterable[Box]],
    objects: Mapping[str, ObjectEntry],
    metrics: Mapping[str, float] | None = None,
    digest: str = digests.DEFAULT,
    progress: Callable[[int], None] = lambda done: None,
) -> Path:
    """Commit ``step`` to the store at ``store`` and return its directory.

    ``contents`` has the boxes of each file in the order of the bytes; a box is freed when it is
    written, so memory is one box and 5 blocks of 4 MiB. The store is locked meanwhile. ``progress`` gets
    the bytes written so far. Raises StepExists if it has the step or a newer one, and CorruptCheckpoint, before the
    commit, for boxes that do not tile their tensors.
    """
    store.mkdir(parents=True, exist_ok=True)
    refuse_foreign(store)
    lock = Lock(store)
    target = directories.step_directory(store, step)
    temporary = store / f"{target.name}.tmp-{secrets.token_hex(4)}"
    try:
        newest = max(directories.list_steps(store), default=-1)
        if step <= newest:
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
        named, numbers = dict(objects), dict(metrics or {})
        table = Manifest(step, torch.__version__, file_entries, tensors, named, numbers, digest)
        manifest.decode(manifest.encode(table), str(target / manifest.NAME))
        directories.seal(temporary, table, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        lock.release()
    return target


def _write_file(
    path: Path, boxes: Iterable[Box], tensors: dict[str, TensorEntry], digest: str
) -> FileEntry:
    block_file = BlockFile(path, 2, digest)
    try:
        for box in boxes:
            data = box.data.contiguous()
            name = tree.dotted_name(box.path)
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
