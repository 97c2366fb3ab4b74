"""Expert parallelism: shard the experts of a layer, or of all layers of a model, over ranks."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar

import torch.distributed as dist
from torch import nn

from forge_moe._shared.problems import invalid
from forge_moe.dispatch import AllToAllDispatch, HierarchicalDispatch
from forge_moe.dispatch.all_to_all import check_divisible
from forge_moe.experts import Experts
from forge_moe.layer import MoE
from forge_moe.protocols import OverlappingDispatcher
from forge_moe.sorted_experts import SortedExperts

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

M = TypeVar("M", bound=nn.Module)


def expert_parallelize(
    model: M,
    mesh: DeviceMesh,
    *,
    dispatcher: Literal["all_to_all", "hierarchical"] = "all_to_all",
    chunks: int = 1,
    ranks_per_node: int | None = None,
    timeout: timedelta | None = None,
) -> M:
    """Shard the experts of every MoE layer in `model` (or of the layer `model`) over `mesh`, and all `SortedExperts`.

        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("efsdp", "ep"))
        expert_parallelize(model, mesh["ep"])
        for layer in moe_layers:                            # optional: shard them again
            fully_shard(layer.experts, mesh=mesh["efsdp"])
            layer.experts.set_gradient_divide_factor(1.0)
            layer.experts.set_force_sum_reduction_for_comms(True)

    `mesh` is a DeviceMesh of one axis. Expert parameters become DTensors `Shard(0)` on it: expert e keeps
    its global index e, so checkpoints, optimizer states and norms see all E experts. Every rank must hold
    the same values before; no communication; parameters on the meta device stay there. Routers and shared
    experts stay replicated: their gradients are partial and the caller sums them over data ranks, as for
    any dense parameter. Expert gradients are complete over `mesh` and must not be reduced over it again.
    Ranks of `mesh` read different data.

    "hierarchical" crosses nodes of `ranks_per_node` neighboring ranks once per token and node, and creates
    two process groups, collectively over the mesh, with `timeout` for their collectives. Returns the same
    object. Call it before FSDP. Raises ValueError if there is no layer, if E is not divisible by the ranks,
    if experts are sharded already, or if the nodes do not divide the ranks.
    """
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh):
        raise invalid("mesh", "type", mesh, "must be a DeviceMesh of one axis", "pass mesh['ep']")
    layers = {n: m for n, m in model.named_modules() if isinstance(m, MoE | SortedExperts)}
    if not layers:
        raise invalid("model", "missing", ..., "has no forge_moe.MoE", "pass one that has")
    if mesh.ndim != 1:
        rule = f"must have one axis, and has {mesh.ndim}"
        raise invalid("mesh", "dims", mesh.mesh_dim_names, rule, "pass mesh['ep']")
    for name, layer in layers.items():
        _check(name or type(layer).__name__, _experts_of(layer), mesh.size())
    make_dispatcher = _dispatcher_factory(mesh.get_group(), dispatcher, ranks_per_node, timeout)
    for layer in layers.values():
        layer.dispatcher = make_dispatcher(layer.config.num_experts, chunks=chunks)
        _shard(_experts_of(layer), mesh)
    return model


def _experts_of(layer: MoE | SortedExperts) -> Experts:
    return layer.experts if isinstance(layer, MoE) else layer


def _check(name: str, experts: Experts, ranks: int) -> None:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    check_divisible(experts.config.num_experts, ranks, name)
    if isinstance(experts, FSDPModule):
        rule, fix = "are wrapped by FSDP", "call expert_parallelize before it"
        raise invalid("experts", "wrapped", ..., rule, fix, where=name)
    if any(isinstance(p, DTensor) for p in experts.parameters()):
        rule, fix = "are sharded already", "call expert_parallelize once"
        raise invalid("experts", "sharded", ..., rule, fix, where=name)


def _shard(experts: nn.Module, mesh: DeviceMesh) -> None:
    """Replace each parameter by this rank's shard, as a DTensor over all experts."""
    from torch.distributed.tensor import DTensor, Shard

    ranks, rank = mesh.size(), mesh.get_local_rank()
    for name, parameter in list(experts.named_parameters(recurse=False)):
        # A copy: a view would keep the other ranks' experts in memory.
        local = parameter.detach().chunk(ranks, dim=0)[rank].clone()
        sharded = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        sharded_parameter = nn.Parameter(sharded, requires_grad=parameter.requires_grad)
        experts.register_parameter(name, sharded_parameter)


def _dispatcher_factory(
    group: dist.ProcessGroup, dispatcher: str, ranks_per_node: int | None, timeout: timedelta | None
) -> Callable[..., OverlappingDispatcher]:
    """A function of num_experts and chunks; the dispatchers of all layers share its process groups."""
    if dispatcher == "all_to_all":
        return partial(AllToAllDispatch, group)
    if dispatcher != "hierarchical":
        fix = "use all_to_all or hierarchical"
        raise invalid("dispatcher", "unknown", dispatcher, "is unknown", fix)
    ranks = dist.get_process_group_ranks(group)
    size = ranks_per_node or 0
    if not 1 <= size <= len(ranks) or len(ranks) % size:
        rule = f"must divide the {len(ranks)} ranks of the mesh"
        fix = "give the number of neighboring ranks that share a fast network"
        raise invalid("ranks_per_node", "divides", ranks_per_node, rule, fix)
    _equalize_group_counts(group)
    node, index = divmod(ranks.index(dist.get_rank()), size)
    neighbors = ranks[node * size : (node + 1) * size]
    between, within = (
        dist.new_group(members, timeout=timeout, use_local_synchronization=True)
        for members in (ranks[index::size], neighbors)
    )
    return partial(HierarchicalDispatch, between, within)


def _equalize_group_counts(group: dist.ProcessGroup) -> None:
    """Let all ranks be in as many groups as the others; some join groups of their own.

    new_group(use_local_synchronization=True) makes the name of a group from its ranks and from the number of groups
    that this process is in. Where that differs, ranks wait for each other under two names.
    """
    count = len(dist.distributed_c10d._world.pg_names)
    counts = [0] * dist.get_world_size(group)
    dist.all_gather_object(counts, count, group=group)
    for _ in range(max(counts) - count):
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
