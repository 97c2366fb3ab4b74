"""Weights of a Hugging Face folder under Forge's names, into a model or a store, without ever holding the model."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from forge_ckpt import codec
from forge_ckpt._shared.hf_tensors import HFTensors
from forge_ckpt._shared.name_rows import Row
from forge_ckpt._shared.paths import user_path
from forge_ckpt._shared.problems import Problem, raise_problems
from forge_ckpt._shared.safetensors_folder import matches
from forge_ckpt.codec import unwrap
from forge_ckpt.manifest import ObjectEntry
from forge_ckpt.write.writer import Box, write_checkpoint


def load_hf(
    path: str | os.PathLike[str],
    maps: Sequence[Row],
    model: nn.Module | None = None,
    *,
    ignore: Sequence[str] = (),
) -> dict[str, Tensor]:
    """Read the weights of a Hugging Face folder, one safetensors file or shards, through the rows ``maps``.

        state = load_hf("Qwen3-0.6B", QWEN3.rows)       # names of Forge -> tensors on the CPU
        load_hf("Qwen3-0.6B", QWEN3.rows, model)        # fills the model; returns its state dict

    A model is filled one tensor at a time, cast to its dtypes; where it holds DTensors, each rank reads
    the tensor and keeps its shard, without communication. ``ignore`` are fnmatch patterns of names, of
    the file or of the model, that are left alone.

    Raises ValueError before anything changes: for names that no row knows, parts that are missing, and
    tensors that only one side has or that have another shape.
    """
    source = HFTensors(path, maps, ignore)
    if model is None:
        return dict(source)
    state: dict[str, Tensor] = model.state_dict()
    wanted = {name: tensor for name, tensor in state.items() if not matches(name, ignore)}
    rule, fix = "is on the meta device", "materialize it (to_empty) before loading"
    meta = [Problem(n, "meta", ..., rule, fix) for n, tensor in wanted.items() if tensor.is_meta]
    raise_problems(str(path), [*source.problems(wanted), *meta][:8])
    fill_part(model, source.read, {name: name for name in source.meta})
    return state


def fill_part(model: nn.Module, read: Callable[[str], Tensor], names: Mapping[str, str]) -> None:
    """Fill those tensors that this rank's part of a model has; ``names`` are {tensor of the model: argument of ``read``}.

    Each rank reads full tensors, one at a time, without communication.
    """
    state = model.state_dict()
    for name, theirs in names.items():
        if name in state:  # a stage of a pipeline has only some of them
            fill_tensor(name, state[name], read(theirs))


@torch.no_grad()
def fill_tensor(name: str, target: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor into ``target``, of which this rank may hold a shard. No communication."""
    size = whole.size()
    box = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    entry = TensorStorageMetadata(TensorProperties(dtype=whole.dtype), size, [box])
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    planner.set_up_planner({name: target}, Metadata({name: entry}), False)
    for item in planner.create_local_plan().items:
        source = whole
        for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths)):
            source = source.narrow(dim, start, length)
        unwrap(planner.resolve_tensor(item)).copy_(source)


def store_hf(
    store: str | os.PathLike[str],
    step: int,
    source: HFTensors,
    *,
    dtype: torch.dtype | None = torch.float32,
    about: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """Commit the tensors of ``source`` below ``model`` as ``step`` of a store; returns its directory.

        store_hf("runs/a/checkpoints", 0, HFTensors("Qwen3-0.6B", QWEN3.rows))

    ``dtype`` casts floating-point tensors (None: as in the files); ``about`` are further objects by name. ``progress`` gets
    the bytes of the files that were read, and those of all tensors.
    The model is never held: memory is one tensor, its cast, and the blocks of the writer. Raises StepExists
    if the store has the step or a newer one.
    """

    def boxes() -> Iterator[Box]:
        done = 0
        for name, meta in source.meta.items():
            tensor = source.read(name)
            done += meta.nbytes
            progress(done, total)
            if dtype is not None and tensor.is_floating_point():
                tensor = tensor.to(dtype)
            yield Box.whole(("model", name), tensor)
            del tensor  # or it would live while the next one is read

    total = sum(meta.nbytes for meta in source.meta.values())
    found = {
        name: ObjectEntry((name,), codec.encode(value, name))
        for name, value in (about or {}).items()
    }
    return write_checkpoint(user_path(store), step, [boxes()], found)
