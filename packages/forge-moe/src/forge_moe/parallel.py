"""Expert parallelism: shard experts over ranks, the gradient norm of such a model, and loading full tensors into it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge_moe._registered import find_registered
from forge_moe._shared.problems import Problem, invalid, raise_problems
from forge_moe._shared.shards import local_tensor, shard_like
from forge_moe.dispatch.all_to_all import AllToAllDispatch, HierarchicalDispatch, check_divisible
from forge_moe.experts import SortedExperts
from forge_moe.layer import MoE
from forge_moe.protocols import OverlappingDispatcher

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

M = TypeVar("M", bound=nn.Module)

__all__ = ["expert_grad_norm", "expert_parallelize", "find_dispatcher", "load_full_state"]


def expert_parallelize(
    model: M,
    mesh: DeviceMesh,
    *,
    dispatcher: str = "all_to_all",
    chunks: int = 1,
    ranks_per_node: int | None = None,
    timeout: timedelta | None = None,
) -> M:
    """Shard the experts of every MoE layer in `model` (or of the layer `model`), and all `SortedExperts`, over `mesh`.

        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("efsdp", "ep"))
        expert_parallelize(model, mesh["ep"])
        for layer in moe_layers:                            # optional: shard them again
            fully_shard(layer.experts, mesh=mesh["efsdp"])
            layer.experts.set_gradient_divide_factor(1.0)
            layer.experts.set_force_sum_reduction_for_comms(True)

    `mesh` is a DeviceMesh of one axis; its ranks read different data. Expert parameters become DTensors `Shard(0)` on it:
    expert e keeps its global index e, so checkpoints, optimizer states and norms see all E experts. Every rank must hold
    the same values before; no communication; parameters on the meta device stay there. Routers and shared experts stay
    replicated: their gradients are partial and the caller sums them over data ranks, as for any dense parameter. Expert
    gradients are complete over `mesh` and must not be reduced over it again.

    `dispatcher` is "all_to_all", "hierarchical" or what `find_dispatcher` finds. "hierarchical" sends a token once to each node of `ranks_per_node` neighboring ranks, and creates two process groups,
    collectively over the mesh, with `timeout` for their collectives. Returns the same object. Call it before FSDP. Raises
    ValueError if there is no layer, if E is not divisible by the ranks, if experts are sharded already, or if the nodes
    do not divide the ranks.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    if not isinstance(mesh, DeviceMesh):
        raise invalid("mesh", "type", mesh, "must be a DeviceMesh of one axis", "pass mesh['ep']")
    layers = {n: m for n, m in model.named_modules() if isinstance(m, MoE | SortedExperts)}
    if not layers:
        raise invalid("model", "missing", ..., "has no forge_moe.MoE", "pass one that has")
    if mesh.ndim != 1:
        rule = f"must have one axis, and has {mesh.ndim}"
        raise invalid("mesh", "dims", mesh.mesh_dim_names, rule, "pass mesh['ep']")
    stacks = {n: m.experts if isinstance(m, MoE) else m for n, m in layers.items()}

    # All is checked before any layer changes: an error leaves the model as it was.
    for name, experts in stacks.items():
        where = name or type(layers[name]).__name__
        check_divisible(experts.config.num_experts, mesh.size(), where)
        if isinstance(experts, FSDPModule):
            rule, fix = "are wrapped by FSDP", "call expert_parallelize before it"
            raise invalid("experts", "wrapped", ..., rule, fix, where=where)
        if any(isinstance(p, DTensor) for p in experts.parameters()):
            rule, fix = "are sharded already", "call expert_parallelize once"
            raise invalid("experts", "sharded", ..., rule, fix, where=where)

    make_dispatcher = _dispatcher_factory(mesh.get_group(), dispatcher, ranks_per_node, timeout)
    for name, experts in stacks.items():
        layers[name].dispatcher = make_dispatcher(experts.config.num_experts, chunks=chunks)
        _shard_experts(experts, mesh)
    return model


def _shard_experts(experts: nn.Module, mesh: DeviceMesh) -> None:
    """Replace each parameter by this rank's shard, as a DTensor over all experts."""
    from torch.distributed.tensor import DTensor, Shard

    ranks, rank = mesh.size(), mesh.get_local_rank()
    for name, parameter in list(experts.named_parameters(recurse=False)):
        # A copy: a view would keep the other ranks' experts in memory.
        local = parameter.detach().chunk(ranks, dim=0)[rank].clone()
        sharded = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        sharded_parameter = nn.Parameter(sharded, requires_grad=parameter.requires_grad)
        experts.register_parameter(name, sharded_parameter)


def find_dispatcher(name: str) -> Callable[..., OverlappingDispatcher]:
    """Find what makes a dispatcher: a built-in one, an entry point of the group `forge.dispatchers`, or "module:attribute".

    It is called with (group, num_experts, chunks=chunks) for each layer. Raises ValueError for an unknown name, and for
    a path to what cannot be called.
    """
    built_in = {"all_to_all": AllToAllDispatch, "hierarchical": HierarchicalDispatch}
    found: Any = find_registered("dispatcher", name, "forge.dispatchers", built_in)
    if not callable(found):
        rule, fix = f"must be callable, and is a {type(found).__name__}", "give a class or function"
        raise invalid("dispatcher", "type", name, rule, fix)
    return found


def _dispatcher_factory(
    group: dist.ProcessGroup, dispatcher: str, ranks_per_node: int | None, timeout: timedelta | None
) -> Callable[..., OverlappingDispatcher]:
    """A function of num_experts and chunks; the dispatchers of all layers share its process groups."""
    make = find_dispatcher(dispatcher)
    if make is not HierarchicalDispatch:
        return partial(make, group)

    ranks = dist.get_process_group_ranks(group)
    size = ranks_per_node or 0
    if not 1 <= size <= len(ranks) or len(ranks) % size:
        rule = f"must divide the {len(ranks)} ranks of the mesh"
        fix = "give the number of neighboring ranks that share a fast network"
        raise invalid("ranks_per_node", "divides", ranks_per_node, rule, fix)

    _equalize_group_counts(group)
    node, index = divmod(ranks.index(dist.get_rank()), size)
    neighbors = ranks[node * size : (node + 1) * size]
    new_group = partial(dist.new_group, timeout=timeout, use_local_synchronization=True)
    return partial(HierarchicalDispatch, new_group(ranks[index::size]), new_group(neighbors))


def _equalize_group_counts(group: dist.ProcessGroup) -> None:
    """Create groups of one rank until all ranks of `group` are in equally many groups.

    new_group(use_local_synchronization=True) makes the name of a group from its ranks and from the number of groups that
    this process is in. With different numbers, ranks wait for each other under two names: a deadlock.
    """
    count = len(dist.distributed_c10d._world.pg_names)
    counts = [0] * dist.get_world_size(group)
    dist.all_gather_object(counts, count, group=group)
    for _ in range(max(counts) - count):
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)


@torch.no_grad()
def expert_grad_norm(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """Return the 2-norm of all gradients of `model`, as one process has it; 0-dim fp32, the same bits on each rank.

        norm = expert_grad_norm(model, mesh["ep"])      # after the dense gradients were summed over ranks
        nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm, foreach=False)
        optimizer.step()

    `mesh` is the one given to `expert_parallelize`. Gradients that are DTensors (experts, FSDP's) are summed over their
    meshes, and replicated values count once. Plain gradients must be the same on every rank, as after DDP or an
    all-reduce; local ones give a wrong norm. torch's own `clip_grad_norm_` rejects such a mixture of plain tensors and
    DTensors. For loops without forge-parallel.

    Sums are fp64. Costs one all-reduce of a number per axis of each mesh, no host sync. Raises ValueError for a model
    without experts on `mesh`, and for a gradient that is still a partial sum.
    """
    from torch.distributed.tensor import DTensor

    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    sharded = {n: p for n, p in model.named_parameters() if isinstance(p, DTensor)}
    axis = getattr(mesh, "mesh_dim_names", None) or ()
    if not any(set(axis) <= set(p.device_mesh.mesh_dim_names or ()) for p in sharded.values()):
        fix = "pass the mesh given to expert_parallelize"
        raise invalid("mesh", "missing", mesh, "has no experts of the model", fix)

    # Squares are summed per mesh first: one all-reduce per mesh axis, not per parameter.
    squares: dict[DeviceMesh, Tensor] = {}
    total = torch.zeros((), dtype=torch.float64, device=next(iter(sharded.values())).device)
    for name, gradient in gradients.items():
        if not isinstance(gradient, DTensor):
            total += gradient.double().square().sum()
            continue
        if any(placement.is_partial() for placement in gradient.placements):
            raise invalid(name, "partial", ..., "has a partial sum as gradient", "reduce it before")

        # Each value counts once: divide by the number of ranks that hold it.
        owner = gradient.device_mesh
        sizes = zip(owner.shape, gradient.placements, strict=True)
        replicas = math.prod(size for size, placement in sizes if placement.is_replicate())
        local = gradient.to_local().double().square().sum() / replicas
        squares[owner] = squares[owner] + local if owner in squares else local

    for owner, total_of_mesh in squares.items():
        for dim in range(owner.ndim):
            dist.all_reduce(total_of_mesh, group=owner.get_group(dim))
        total += total_of_mesh
    return total.sqrt().float()


@torch.no_grad()
def load_full_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy `state`, full tensors of all experts, into `model`; each rank takes its own shard.

        expert_parallelize(model, mesh["ep"])
        load_full_state(model, torch.load("model.pt", weights_only=True))

    `state` has a tensor for each name of `model.state_dict()`, of the global shape; values are cast to the model's dtype.
    No communication: every rank passes, and holds, the full state. Raises ValueError with a line for each name that is
    missing, unknown or of another shape, before anything is changed; also for parameters on the meta device
    (`model.to_empty` allocates them), and for those that FSDP has sharded again: load before `fully_shard`. For loops
    without forge-ckpt.
    """
    targets: dict[str, Any] = model.state_dict()
    names = sorted(targets.keys() | state.keys())
    problems = [problem for name in names for problem in _state_problems(name, targets, state)]
    raise_problems("load_full_state", problems)

    for name, target in targets.items():
        if isinstance(target, Tensor):
            local_tensor(target).copy_(shard_like(state[name], target))


def _state_problems(
    name: str, targets: Mapping[str, Any], state: Mapping[str, Any]
) -> Iterator[Problem]:
    """A problem for the first rule that the tensor `name` breaks."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    target, value = targets.get(name), state.get(name)
    if name not in state:
        yield Problem(name, "missing", ..., "is missing", "save the full model")
    elif name not in targets:
        yield Problem(name, "unknown", ..., "is unknown", "leave it out")
    elif not isinstance(target, Tensor):
        yield Problem(name, "extra", ..., "is extra state, not a tensor", "use load_state_dict")
    elif not isinstance(value, Tensor) or isinstance(value, DTensor):
        kind = type(value).__name__

        yield Problem(name, "type", kind, "must be a plain tensor", "give the full tensor")
    elif value.shape != target.shape:
        rule, fix = f"must be {tuple(target.shape)}", "give all experts of this model"
        yield Problem(name, "shape", tuple(value.shape), rule, fix)
    elif target.is_meta:
        fix = "call model.to_empty(device=...) before"
        yield Problem(name, "meta", ..., "is on the meta device", fix)
    # FSDP on a mesh axis of experts' DTensors uses a placement class of its own (strided shards).
    elif any(type(p) not in (Shard, Replicate) for p in getattr(target, "placements", ())):
        rule = f"is sharded by {target.placements}"  # type: ignore[attr-defined]
        yield Problem(name, "fsdp", ..., rule, "load before fully_shard")
