"""The ranks of a job and the axes they are arranged along."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from forge_parallel._torch_compat import set_timeout
from forge_parallel.config import ParallelConfig
from forge_parallel.device import select_device
from forge_parallel.start import end_process_group, find_world, start_process_group


@dataclass(frozen=True)
class Meshes:
    """One world, and the views of it that the parts of a step need.

    dense  storage of dense parameters: a DeviceMesh with the axes `dp_shard`, or `dp_replicate` and
           `dp_shard`; neighbouring ranks share a shard group, so that it stays inside a node where
           nodes allow. None where nothing is wrapped: one process in fp32.
    sparse  storage of experts, over the same ranks: `efsdp` and `ep`, behind `dp_replicate` where there are
           copies; efsdp = dp_shard / ep. Neighbouring ranks share an `ep` group. None without ep.
    batch  data loading: this process reads columns `batch_rank` of `batch_size`.
    host_group  gloo over all ranks for what concerns hosts (agreement, checkpoints); None for one.
    """

    device: torch.device
    rank: int = 0
    world_size: int = 1
    batch_rank: int = 0
    batch_size: int = 1
    dense: Any = None
    sparse: Any = None
    host_group: Any = None


def make_meshes(config: ParallelConfig, device: torch.device | None = None) -> Meshes:
    """Arrange the ranks of the running process group as `config` says.

    Without a group this is one process; where its precision needs FSDP2 a group of one rank is
    started (no port, no file; `end_process_group` ends it). Collective: every rank calls it. Raises
    ValueError when the axes do not multiply to the world size. Usage: `meshes = make_meshes(config)`.
    """
    device = select_device(config.device) if device is None else device
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    replicate, shard = config.data_layout(world_size)
    if world_size == 1 and config.precision == "fp32" and not config.cpu_offload:
        return Meshes(device)
    if not dist.is_initialized():
        start_process_group(_ALONE, device)
    copies = {"dp_replicate": replicate} if replicate > 1 else {}
    rank = dist.get_rank()
    return Meshes(
        device=device,
        rank=rank,
        world_size=world_size,
        batch_rank=rank,
        batch_size=world_size,
        dense=_mesh(config, device, {**copies, "dp_shard": shard}),
        sparse=(
            _mesh(config, device, {**copies, "efsdp": shard // config.ep, "ep": config.ep})
            if config.ep > 1
            else None
        ),
        host_group=_host_group(config) if world_size > 1 else None,
    )


def _mesh(config: ParallelConfig, device: torch.device, axes: Mapping[str, int]) -> Any:
    """A mesh whose groups have the job's timeout, not torch's half hour."""
    # imported late: half a second that an fp32 run of one process does not need
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    for group in mesh.get_all_groups():
        set_timeout(group, config.timeout_seconds)
    return mesh


def _host_group(config: ParallelConfig) -> Any:
    timeout = timedelta(seconds=config.timeout_seconds)
    return dist.new_group(backend="gloo", timeout=timeout)


@contextmanager
def launch(config: ParallelConfig, facts: Mapping[str, str] | None = None) -> Iterator[Meshes]:
    """Start the process group that the environment describes, and end it with the block.

        with launch(ParallelConfig(dp_replicate=2)) as meshes:
            model = parallelize(model_on_meta, config, meshes)

    Under torchrun, srun or RANK/WORLD_SIZE this is one rank of many, otherwise one process. `facts`
    must be the same on all ranks (a digest of the configuration, say). Raises ValueError before any
    group exists when the layout does not fit, StartError when the ranks do not come together.
    """
    world = find_world()
    config.data_layout(world.world_size)
    device = select_device(config.device)
    if world.world_size > 1:
        start_process_group(
            world,
            device,
            timeout_seconds=config.timeout_seconds,
            start_timeout_seconds=config.start_timeout_seconds,
            facts=facts or {},
        )
    try:
        yield make_meshes(config, device)
    except BaseException:
        end_process_group(wait=False)  # the others may be gone, or wait for this rank to be
        raise
    end_process_group()


_ALONE = find_world({})
