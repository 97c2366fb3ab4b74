"""The storage writer behind dcp.save: temporary directory, data files, manifest, rename."""

import dataclasses
import math
import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from forge_ckpt import files, generations, manifest
from forge_ckpt.errors import StepExists
from forge_ckpt.write.blocks import BlockFile
from forge_ckpt.write.planner import ForgeSavePlanner, memory_of


class ForgeWriter(StorageWriter):
    """For ``dcp.save(state, storage_writer=ForgeWriter(path, step=100), planner=ForgeSavePlanner())``.

    ``path`` appears, complete and durable, by one rename after every rank has written; before that
    there is only ``<path>.tmp-<random>`` beside it, which a failed save leaves (``discard`` removes
    it). Each rank writes ``data-<rank>.bin`` in a directory that all ranks see.

    Memory: ``2 * threads + 1`` blocks of 4 MiB, and one tensor where it is not contiguous or not on
    the CPU. Raises StepExists when ``path`` is already there.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, step: int | None = None, threads: int = 2
    ) -> None:
        self.path = Path(path)
        self.step = step
        self.threads = threads
        self._temporary: Path | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new save begins; ``checkpoint_id``, if given, is its path."""
        if checkpoint_id is not None:
            self.path = Path(checkpoint_id)
        self._temporary = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing is made before all ranks have planned."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Torch's plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the temporary directory (coordinator only) and tell every rank its name and number."""
        if os.path.lexists(self.path):
            raise StepExists(f"{self.path} exists; a checkpoint is never written in place")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        name = f"{self.path.name}.tmp-{secrets.token_hex(4)}"
        self._temporary = self.path.parent / name
        self._temporary.mkdir()
        return [
            dataclasses.replace(plan, storage_data=(name, rank)) for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors; objects and digests travel to the coordinator as results."""
        if not isinstance(planner, ForgeSavePlanner):
            raise ValueError(
                f"planner {type(planner).__name__} would pickle objects; pass ForgeSavePlanner()"
            )
        name, rank = plan.storage_data
        self._temporary = self.path.parent / name
        target = self._temporary / f"data-{rank}.bin"
        block_file = BlockFile(target, self.threads)
        try:
            results = _write_items(plan, planner, block_file, target.name)
            entry = block_file.finish()
        finally:
            block_file.close()
        results.append(WriteResult(MetadataIndex(target.name), entry.size, entry))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit (coordinator only, after every rank has written): manifest, fsync, rename, fsync."""
        assert self._temporary is not None, "torch calls prepare_global_plan first"
        made = _manifest(self.step, metadata, [result for rank in results for result in rank])
        files.write_file(self._temporary / manifest.NAME, manifest.encode(made))
        files.sync_directory(self._temporary)
        if os.path.lexists(self.path):  # rename would replace an empty directory without a word
            raise StepExists(f"{self.path} appeared during the save; two writers share the place")
        generations.commit(self._temporary, self.path)
        self._temporary = None

    def discard(self) -> None:
        """Remove what a failed save left; after a commit, nothing."""
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any path that is not a URL."""
        return "://" not in os.fspath(checkpoint_id)


def _write_items(
    plan: SavePlan, planner: SavePlanner, block_file: BlockFile, name: str
) -> list[WriteResult]:
    results: list[WriteResult] = []
    # Tied tensors are written once. The tensors are kept, or a freed address could be met again.
    written: dict[tuple[Any, ...], tuple[torch.Tensor, tuple[str, int, int]]] = {}
    for item in plan.items:
        data = planner.resolve_data(item)
        if item.type == WriteItemType.BYTE_IO:
            text = data.getvalue().decode()  # type: ignore[union-attr]
            results.append(WriteResult(item.index, len(text), text))
            continue
        assert isinstance(data, torch.Tensor)
        key = memory_of(data)
        if key not in written or data.numel() == 0:
            host = _host(data)
            view = files.byte_view(host)
            written[key] = (data, (name, block_file.append(view), len(view)))
        place = written[key][1]
        results.append(WriteResult(item.index, place[2], place))
    return results


def _host(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous CPU tensor of the same values; the same memory when it already is one."""
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def _manifest(
    step: int | None, metadata: Metadata, results: Sequence[WriteResult]
) -> manifest.Manifest:
    file_entries: dict[str, manifest.FileEntry] = {}
    texts: dict[str, str] = {}
    places: dict[tuple[str, tuple[int, ...]], tuple[str, int, int]] = {}
    for result in results:
        fqn, offset, data = result.index.fqn, result.index.offset, result.storage_data
        if isinstance(data, manifest.FileEntry):
            file_entries[fqn] = data
        elif isinstance(data, str):
            texts[fqn] = data
        else:
            places[fqn, tuple(offset or ())] = data
    tensors: dict[str, manifest.TensorEntry] = {}
    found: dict[str, manifest.ObjectEntry] = {}
    for name, entry in metadata.state_dict_metadata.items():
        path = metadata.planner_data[name]
        if isinstance(entry, TensorStorageMetadata):
            chunks = tuple(
                manifest.Chunk(tuple(c.offsets), tuple(c.sizes), *places[name, tuple(c.offsets)])
                for c in entry.chunks
                if math.prod(c.sizes)  # uneven shards may be empty
            )
            tensors[name] = manifest.TensorEntry(
                path, tuple(entry.size), entry.properties.dtype, chunks
            )
        else:
            found[name] = manifest.ObjectEntry(path, manifest.parse(texts[name]))
    return manifest.Manifest(step, torch.__version__, file_entries, tensors, found)
