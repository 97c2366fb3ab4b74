"""The process group of one process, so that one process runs the code of many."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_started_here = False


def one_rank_mesh(device: torch.device) -> DeviceMesh:
    """A mesh of this process alone, axis `dp_shard`.

    Starts a process group of one rank (gloo on a CPU, NCCL on a GPU; no port, no file) unless one is
    running. Raises ValueError when the running group has more ranks.
    """
    global _started_here
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        _started_here = True
    if dist.get_world_size() != 1:
        raise ValueError(
            f"the process group has {dist.get_world_size()} ranks and this layout is for 1; start one "
            "process"
        )
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device.type, (1,), mesh_dim_names=("dp_shard",))


def shutdown() -> None:
    """Destroy the process group if `one_rank_mesh` started it; otherwise do nothing."""
    global _started_here
    if _started_here and dist.is_initialized():
        dist.destroy_process_group()
    _started_here = False
