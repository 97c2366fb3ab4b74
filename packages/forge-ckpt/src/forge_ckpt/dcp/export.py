"""A checkpoint of a store as a plain one of torch.distributed.checkpoint, tensor by tensor."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from forge_ckpt import codec
from forge_ckpt._shared.atomic import new_folder
from forge_ckpt._shared.problems import invalid
from forge_ckpt.read.tensors import SavedTensors


def convert_to_dcp(
    source: Path, target: Path, progress: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Write the checkpoint ``source`` (a step, or the newest of a store) as ``target`` for ``dcp.load``.

    Memory is one tensor: each gets its own file, as DCP's writer holds all tensors of a file until it
    is complete. Each is verified before it is written. ``progress`` gets the bytes read and those of all
    tensors. Raises CorruptCheckpoint, and ValueError for a target that exists.
    """
    if target.exists():
        raise invalid("out", "exists", str(target), "exists", "give a path for a new directory")
    with SavedTensors(source) as saved:
        state: dict[str, Any] = {}
        for name, path in saved.table.paths().items():
            if name not in saved.table.tensors:
                value = saved.read_object(name)
            elif any(isinstance(step, tuple) and step[0] == "tuple" for step in path):
                # DCP stores the tuple as an object, with the tensors in it
                value = saved.read(name)
            else:
                entry = saved.table.tensors[name]
                value = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
            codec.set_element(state, path, value)
        # Torch's writer fsyncs the files, as new_folder needs.
        with new_folder(target) as temporary:
            writer = FileSystemWriter(temporary, single_file_per_rank=False)
            # Torch warns that one process saves, which is intended here.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                planner = _LazyPlanner(saved, progress)
                save(state, storage_writer=writer, planner=planner, no_dist=True)


class _LazyPlanner(DefaultSavePlanner):
    """Reads a tensor when the writer asks for it; the state has meta tensors in their places."""

    def __init__(self, saved: SavedTensors, progress: Callable[[int, int], None]) -> None:
        super().__init__()
        self._saved, self._progress, self._done = saved, progress, 0
        self._total = sum(file.size for file in saved.table.files.values())

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.type == WriteItemType.BYTE_IO:
            return super().resolve_data(write_item)
        tensor = self._saved.read(write_item.index.fqn)
        self._done += tensor.numel() * tensor.element_size()
        self._progress(self._done, self._total)
        return tensor
