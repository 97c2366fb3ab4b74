# Copied from scripts/shared/shards.py; edit that file, then run scripts/copy_shared.py.
"""This rank's shard of a DTensor. A plain tensor is its own shard. No function here communicates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def local_tensor(tensor: Any) -> Tensor:
    """Return this rank's shard of a DTensor, a view of its memory; a plain tensor itself.

    Does not import DTensor, which takes half a second.
    """
    shard: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return shard


def local_indices(tensor: Any, dim: int) -> Tensor:
    """Return (n,) int64: the indices along `dim` of the full tensor that this rank's shard has, on its device."""
    if not hasattr(tensor, "device_mesh"):
        return torch.arange(tensor.size(dim), device=tensor.device)
    from torch.distributed.tensor import Replicate, distribute_tensor

    # torch shards the numbers as it sharded the tensor, so this is right for its uneven and strided placements, too
    placements = [p if getattr(p, "dim", None) == dim else Replicate() for p in tensor.placements]
    shape = [size if d == dim else 1 for d, size in enumerate(tensor.shape)]
    index = torch.arange(tensor.size(dim), device=local_tensor(tensor).device).view(shape)
    own = distribute_tensor(index, tensor.device_mesh, placements, src_data_rank=None)
    return own.to_local().flatten()


def shard_like(full: Tensor, target: Any) -> Tensor:
    """Return the shard of `full` that this rank has of `target`; all of it if `target` is a plain tensor.

    Cost: one host read per sharded dim if `target` is on a GPU and `full` is not.
    """
    for dim in {p.dim for p in getattr(target, "placements", ()) if hasattr(p, "dim")}:
        full = full.index_select(dim, local_indices(target, dim).to(full.device))
    return full
