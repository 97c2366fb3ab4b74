"""What every loss of a step is divided by."""

from __future__ import annotations

import torch
import torch.distributed as dist

from forge_parallel.meshes import Meshes


def global_count(num_valid: float, meshes: Meshes) -> torch.Tensor:
    """Labels of the whole global batch, or the sum of their weights; 1 where that is zero: 0-dim fp32 on the
    device, equal on all ranks.

    `num_valid` is that of the rows that this rank reads, over all micro-batches and before cp cuts them;
    of the ranks that read the same rows one is counted. A sum of token losses divided by it
    gives gradients of one mean over the step, however labels lie over ranks and micro-batches. Cost:
    one all-reduce of one float64, no host sync. Usage: `loss = loss_sum / global_count(n, meshes)`.
    """
    count = torch.tensor(num_valid if meshes.speaks else 0, dtype=torch.float64)
    if meshes.device.type == "cuda":
        count = count.pin_memory().to(meshes.device, non_blocking=True)
    if meshes.world_size > 1:
        dist.all_reduce(count)
    return count.masked_fill(count == 0, 1).float()  # a floor of one would rescale small weights
