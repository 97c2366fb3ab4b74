"""Weights of a Hugging Face folder into a model, tensor by tensor, of which a rank may have a part."""

import os
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from forge_ckpt._shared.hf_tensors import HFTensors
from forge_ckpt._shared.name_rows import Row
from forge_ckpt._shared.problems import Problem, raise_problems
from forge_ckpt._shared.safetensors_folder import matches
from forge_ckpt.wrapped import unwrap


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
        if name in state:  # a stage of a pipeline has some
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
