"""The device of this process, the ranks of a job, and the axes along which they are arranged."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from forge_parallel._shared.problems import invalid, raise_problems
from forge_parallel._torch_compat import set_timeout
from forge_parallel.config import DEVICES, Layout, ParallelConfig, casts_on_one_rank
from forge_parallel.rules import sdpa_problem
from forge_parallel.start import end_process_group, find_world, start_process_group


@dataclass(frozen=True)
class Axis:
    """This rank's group along one mesh axis; without a group it is the only rank."""

    rank: int = 0
    size: int = 1
    group: Any = None


@dataclass(frozen=True)
class Meshes:
    """The ranks of a job, arranged for each use of them in a step.

    Ranks are numbered in row-major order over (pp, dp_replicate, dp_shard, cp, tp): tp neighbors are next to each
    other, so that they are on one node where nodes allow.

    dense  storage of dense parameters: a DeviceMesh whose axes are, as far as they are larger than 1, `pp`,
           `dp_replicate`, then always `dp_shard` (dp_shard x cp: context ranks see other tokens with the same
           weights, so they shard them like data ranks), and `tp` where there is one. None where nothing is
           wrapped: one process in fp32.
    sparse  storage of experts, over the same ranks: (`pp`,) (`dp_replicate`,) `efsdp`, and `ep` if above 1;
           efsdp = dp_shard x cp x tp / ep. None without tp and ep: experts are then sharded like dense parameters.
    pp, cp, tp  this rank's group along the axis: the ranks of its pipeline, of its sequences, of its matrices.
    stage  the ranks that hold the same layers: all of a job without pp.
    batch  data loading: this process reads columns `batch_rank` of `batch_size`. Ranks of one pp, cp, tp
           group read the same; `is_batch_leader` is true on one of them, which counts the labels.
    host_group  gloo over all ranks, for tensors and objects on the host (votes, checkpoints); None for one rank.
    """

    device: torch.device
    rank: int = 0
    world_size: int = 1
    batch_rank: int = 0
    batch_size: int = 1
    dense: Any = None
    sparse: Any = None
    pp: Axis = Axis()
    cp: Axis = Axis()
    tp: Axis = Axis()
    stage: Axis = Axis()
    host_group: Any = None

    @property
    def is_batch_leader(self) -> bool:
        """Whether this rank counts the batch of its pp, cp and tp group."""
        return self.pp.rank == self.cp.rank == self.tp.rank == 0

    def fsdp(self, mesh: Any) -> Any:
        """The axes of `dense` or `sparse` over which FSDP2 keeps replicas and shards."""
        names = ("dp_replicate", "dp_shard", "efsdp")
        return mesh[tuple(name for name in mesh.mesh_dim_names if name in names)]


def select_device(name: str = "auto") -> torch.device:
    """`auto` is this process's GPU if there is one, else the CPU; `cpu` and `cuda` are themselves.

    The GPU is that of this process's local rank (see `find_world`), without a launcher the current one, or the only
    one that it is shown; it becomes the current device. Raises ValueError for an
    unknown name and for `cuda` on a machine without one. Usage: `device = select_device("auto")`.
    """
    if name not in DEVICES:
        raise invalid("device", "unknown", name, f"must be one of {', '.join(DEVICES)}", "use auto")
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        rule = "must have a CUDA GPU and this machine shows none"
        raise invalid("device", "requires", name, rule, "use cpu or auto")
    if name == "cpu" or not available:
        return torch.device("cpu")
    device = torch.device("cuda", _index_of_this_rank() if torch.cuda.device_count() > 1 else 0)
    torch.cuda.set_device(device)
    return device


def _index_of_this_rank() -> int:
    """Where every process is shown all GPUs. A scheduler that assigns one to each task shows it as number 0 in all."""
    world = find_world()
    # ranks that no launcher started (torch.multiprocessing.spawn) have set theirs
    return torch.cuda.current_device() if world.launcher == "none" else world.local_rank


def config_of_mesh(mesh: Any, config: ParallelConfig | None = None) -> ParallelConfig:
    """Return `config` with the axes of a `torch.distributed.DeviceMesh`.

        mesh = init_device_mesh("cuda", (4, 2), mesh_dim_names=("dp_shard", "tp"))
        config_of_mesh(mesh).tp                 # 2

    Dims are named as the fields of ParallelConfig, in the order pp, dp_replicate, dp_shard, cp, tp; `dp` and `fsdp` are
    names of dp_shard, too. An axis without a dim has one rank; ep is taken from `config`.

    Raises ValueError for other names or another order, for a mesh that does not have all ranks in their order, and for a
    config that sets an axis to another size.
    """
    names = tuple(_DIM_NAMES.get(n, n) for n in mesh.mesh_dim_names or ())
    known = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    if not names or [name for name in known if name in names] != list(names):
        rule = f"must be of {', '.join(known)}, in this order, each once"
        fix = "use init_device_mesh(device, shape, mesh_dim_names=('dp_shard', 'tp'))"
        raise invalid("mesh.mesh_dim_names", "names", mesh.mesh_dim_names, rule, fix)
    if mesh.mesh.flatten().tolist() != list(range(dist.get_world_size())):
        rule = f"must be all {dist.get_world_size()} ranks in their order"
        fix = "give the mesh that init_device_mesh makes, not a part of it"
        raise invalid("mesh.mesh", "ranks", mesh.mesh.flatten().tolist(), rule, fix)

    given = config or ParallelConfig()
    axes = {"dp_shard": 1, **dict(zip(names, mesh.mesh.shape))}
    for name in known:
        size, own = axes.setdefault(name, 1), getattr(given, name)
        if own not in (size, -1 if name == "dp_shard" else 1):
            rule = f"must be {size}, as in the mesh"
            raise invalid(name, "mesh", own, rule, "leave it out", where="parallel")
    return replace(given, device=mesh.device_type, **axes)


def make_meshes(
    config: ParallelConfig | None = None,
    device: torch.device | None = None,
    *,
    mesh: Any = None,
) -> Meshes:
    """Return the meshes and groups of `config` over the ranks of the running process group.

    Without a group this is one process; where it needs FSDP2 (`casts_on_one_rank`) a group of one rank is
    started (no port, no file; `end_process_group` ends it). Collective: every rank calls it. Each group
    is used once, so that a broken network shows here and names its axis. Raises ValueError when the axes do
    not multiply to the world size. Usage: `meshes = make_meshes(config)`.

    mesh: a `torch.distributed.DeviceMesh` that gives the axes (`config_of_mesh`). Its own groups are used for parameters
    where its dims are dp_replicate, dp_shard and tp; other axes get groups here.
    """
    config = config_of_mesh(mesh, config) if mesh is not None else config or ParallelConfig()
    if config.layout == "auto":
        rule = "must become a layout first"
        fix = "forge-train does that, and forge_parallel.plan.auto_layout gives its keys"
        raise invalid("layout", "auto", config.layout, rule, fix, where="parallel")
    world = os.environ.get("WORLD_SIZE", "1")
    if not dist.is_initialized() and world != "1":
        rule = "is set and there is no process group: each process would train by itself"
        fix = "use `with launch(config) as meshes`, or torch.distributed.init_process_group"
        raise invalid("WORLD_SIZE", "group", world, rule, fix)

    device = select_device(config.device) if device is None else device
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    layout = config.axes(world_size)
    if world_size == 1 and casts_on_one_rank(config):
        return Meshes(device)
    if not dist.is_initialized():
        start_process_group(_ONE_PROCESS, device)

    rank = dist.get_rank()
    dense_axes = {"dp_shard": layout.dp_shard * layout.cp, "tp": layout.tp}
    # the same ranks, arranged for experts, which tp ranks shard like data ranks
    expert_axes = {"efsdp": layout.dp_shard * layout.cp * layout.tp // layout.ep, "ep": layout.ep}
    dense = _given_mesh(mesh, layout) or _mesh(config, device, layout, dense_axes)
    has_sparse = max(layout.ep, layout.tp) > 1

    meshes = Meshes(
        device=device,
        rank=rank,
        world_size=world_size,
        batch_rank=layout.coordinates(rank)["batch"],
        batch_size=layout.batch_size,
        dense=dense,
        sparse=_mesh(config, device, layout, expert_axes) if has_sparse else None,
        pp=_axis_of(dense, "pp"),
        tp=_axis_of(dense, "tp"),
        cp=_axis_group(config, layout, "cp"),
        stage=_axis_group(config, layout, "stage"),
        host_group=_host_group(config) if world_size > 1 else None,
    )

    _warm_up(meshes)
    return meshes


def _given_mesh(mesh: Any, layout: Layout) -> Any:
    """The caller's mesh in the form of `Meshes.dense`; None where it has another."""
    if mesh is None or layout.cp > 1 or "dp_shard" not in mesh.mesh_dim_names:
        return None
    sizes = zip(mesh.mesh_dim_names, mesh.mesh.shape)
    kept = tuple(name for name, size in sizes if size > 1 or name == "dp_shard")
    return mesh if kept == mesh.mesh_dim_names else mesh[kept]


def with_one_rank(config: ParallelConfig, meshes: Meshes) -> Meshes:
    """`meshes` of one unwrapped process with a dense mesh of its one rank, for a model that needs FSDP2 on one rank.
    Starts a group of one rank if no group is running, as `make_meshes` does."""
    if not dist.is_initialized():
        start_process_group(_ONE_PROCESS, meshes.device)
    return replace(meshes, dense=_mesh(config, meshes.device, config.axes(1), {"dp_shard": 1}))


def _mesh(
    config: ParallelConfig, device: torch.device, layout: Layout, storage_axes: Mapping[str, int]
) -> Any:
    """A mesh of pp, dp_replicate and `storage_axes`, whose groups have the job's timeout, not torch's half hour.

    Axes of one rank are left out, but that over which FSDP2 shards.
    """
    sizes = {"pp": layout.pp, "dp_replicate": layout.dp_replicate, **storage_axes}
    axes = {n: size for n, size in sizes.items() if size > 1 or n in ("dp_shard", "efsdp")}
    # imported late: half a second that an fp32 run of one process does not need
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    for group in mesh.get_all_groups():
        set_timeout(group, config.timeout_seconds)
    return mesh


def _axis_of(mesh: Any, name: str) -> Axis:
    """This rank's group along a mesh axis; one rank without this axis."""
    if name not in mesh.mesh_dim_names:
        return Axis()
    one = mesh[name]
    return Axis(one.get_local_rank(), one.size(), one.get_group())


def _axis_group(config: ParallelConfig, layout: Layout, axis: str) -> Axis:
    """This rank's group along `axis`."""
    size, _ = layout.axes()[axis]
    if axis == "stage" and layout.pp == 1:
        return Axis(dist.get_rank(), size, dist.group.WORLD)
    if size == 1:
        return Axis()
    timeout = timedelta(seconds=config.timeout_seconds)
    group, _ = dist.new_subgroups_by_enumeration(layout.groups(axis), timeout=timeout)
    return Axis(layout.coordinates(dist.get_rank())[axis], size, group)


def _host_group(config: ParallelConfig) -> Any:
    """A gloo group over all ranks."""
    timeout = timedelta(seconds=config.timeout_seconds)
    # fake: one process stands for all ranks
    backend = "fake" if dist.get_backend() == "fake" else "gloo"
    return dist.new_group(backend=backend, timeout=timeout)


def _warm_up(meshes: Meshes) -> None:
    """One small all-reduce over every group: connections are made now, and an error names rank, axis and peers."""
    groups = {name: getattr(meshes, name).group for name in ("cp", "stage")}
    for view in ("dense", "sparse"):
        mesh = getattr(meshes, view)
        if mesh is not None:
            groups |= {name: mesh.get_group(name) for name in mesh.mesh_dim_names}

    for name, group in groups.items():
        if group is None or dist.get_world_size(group) == 1:
            continue
        ones = torch.ones(1, device=meshes.device)
        try:
            dist.all_reduce(ones, group=group)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {meshes.rank}: the first collective over axis {name} of ranks "
                f"{dist.get_process_group_ranks(group)} failed: {error}"
            ) from error


@contextmanager
def sdpa_kernel(name: str) -> Iterator[None]:
    """Let torch's attention take only this kernel: flash, efficient, cudnn or math; "auto" leaves it to choose.

    Under deterministic algorithms "auto" leaves cuDNN out, whose backward adds in any order. The setting is the
    process's, as `torch.nn.attention.sdpa_kernel`'s is, and is put back at the end. A call that the kernel cannot compute
    (a window in fp32 has a mask, which CUDA's flash has not) raises torch's "No viable backend".
    """
    cuda = torch.backends.cuda
    switches = {
        "flash": (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
        "efficient": (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
        "cudnn": (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
        "math": (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    }

    before = {kind: enabled() for kind, (enabled, _) in switches.items()}
    chosen = before | {
        "cudnn": before["cudnn"] and not torch.are_deterministic_algorithms_enabled()
    }
    if name != "auto":
        chosen = {kind: kind == name for kind in switches}

    try:
        for kind, (_, enable) in switches.items():
            enable(chosen[kind])
        yield
    finally:
        for kind, (_, enable) in switches.items():
            enable(before[kind])


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
    config.axes(world.world_size, world.local_world_size)
    device = select_device(config.device)
    if wrong := sdpa_problem(config.sdpa, device, config.precision):
        raise_problems("parallel", [wrong])

    if world.world_size > 1:
        start_process_group(
            world,
            device,
            timeout_seconds=config.timeout_seconds,
            start_timeout_seconds=config.start_timeout_seconds,
            facts=facts or {},
        )
    try:
        with sdpa_kernel(config.sdpa):
            yield make_meshes(config, device)
    except BaseException:
        end_process_group(wait=False)  # the others may be gone, or wait for this rank to be
        raise
    end_process_group()


#: Other names of mesh dims.
_DIM_NAMES = {"dp": "dp_shard", "fsdp": "dp_shard"}
_ONE_PROCESS = find_world({})
