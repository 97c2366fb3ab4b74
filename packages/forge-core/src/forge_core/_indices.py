"""Which indices of a whole tensor a rank holds of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def own_indices(tensor: Any, dim: int) -> Tensor:
    """(n,) int64: indices along `dim` of the whole tensor that this rank's part has, on the part's device.

    Torch cuts them as it cut the DTensor, whatever its placements; of a plain tensor it is all. Nothing is sent.
    """
    if not hasattr(tensor, "device_mesh"):
        return torch.arange(tensor.size(dim), device=tensor.device)
    # imported late: half a second that processes without ranks do not need
    from torch.distributed.tensor import Replicate, distribute_tensor

    device = tensor.to_local().device
    cuts = [p if getattr(p, "dim", None) == dim else Replicate() for p in tensor.placements]
    shape = [size if d == dim else 1 for d, size in enumerate(tensor.shape)]
    index = torch.arange(tensor.size(dim), device=device).view(shape)
    return (
        distribute_tensor(index, tensor.device_mesh, cuts, src_data_rank=None).to_local().flatten()
    )
