"""From a model to this rank's stages of it: which blocks each stage has, and the weights that two stages hold.

The most expensive stage sets the pace of a pipeline, so it is made cheap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge_parallel._shared.problems import raise_problems
from forge_parallel._shared.shards import local_tensor
from forge_parallel.config import ParallelConfig, num_stages, stages_on
from forge_parallel.meshes import Meshes
from forge_parallel.rules import tied_on_one_rank, too_few_layers
from forge_parallel.structure import Structure, blocks_by_key, mark, parts_of, stages_of

#: Cost of an embedding as a fraction of a matmul with its table: a lookup multiplies nothing, but it moves memory, and
#: its gradient and update pass over the table.
EMBEDDING_COST = 0.05


def split(
    model: nn.Module,
    config: ParallelConfig,
    meshes: Meshes,
    *,
    seq_len: int = 2048,
    structure: Structure | None = None,
) -> list[nn.Module]:
    """Prune `model` in place to the children of this rank's stages; return these stages, in order of depth.

        stages = split(model, config, meshes, seq_len=2048)
        for stage in stages:
            apply_fsdp(stage, ...)                 # each is a root of FSDP2
        optimizer = SGD(model.parameters())        # those of this rank, under the names of the full model

    Children of other ranks become None, and the container of the blocks keeps its keys, so names are those of
    the full model. Stages cost about the same for sequences of `seq_len` (see `block_costs`). The only stage of a rank is
    `model` itself; each of several is a shallow copy of it that shares its modules, so replace modules (float8)
    before. A child without parameters belongs to all stages. `structure` is that of `structure_of`, if it was
    found before.

    Costs nothing; no communication. ValueError as `parts_of` and `stage_ranges`, and for tied ends in a
    V-schedule, whose two ends are one rank; OrderError after a later step, or a second time.
    """
    parts = parts_of(model, structure)
    if wrong := tied_on_one_rank(config, parts.tied):
        raise_problems("", [wrong])
    count, keys = num_stages(config), list(blocks_by_key(model, parts))
    ranges = stage_ranges(block_costs(model, parts, seq_len), count, parts.first_blocks)
    mark(model, "split")

    local = stages_on(config, meshes.pp.rank)
    blocks = {stage: {keys[i] for i in ranges[stage]} for stage in local}
    ends = {stage: _ends(parts, stage, count) for stage in local}
    _prune(model, parts, set().union(*ends.values()), set().union(*blocks.values()))

    stages = [model]
    if len(local) > 1:
        stages = [_stage(model, parts, ends[stage], blocks[stage]) for stage in local]
    for stage, module in zip(local, stages):
        module.pipeline_stage = stage  # type: ignore[assignment]
    model.__dict__["pipeline_stages"] = stages
    model.__dict__["pipeline_tied"] = parts.tied
    return stages


def block_costs(model: nn.Module, parts: Structure, seq_len: int) -> list[float]:
    """Forward FLOPs per token of each block, in order, in sequences of `seq_len`; no communication.

    Counted by the block's own `flops_per_token(seq_len)`, or two per parameter without this method. The
    first block also bears the modules before it (EMBEDDING_COST of a matmul with them), the last one the norm
    and head after it (two per parameter; a tied head is a matmul with the table).
    """
    costs = [_cost(block, seq_len) for block in blocks_by_key(model, parts).values()]
    if costs:
        before, after = (
            [model._modules[name] for name in names] for names in (parts.first, parts.last)
        )
        costs[0] += EMBEDDING_COST * sum(_products(m) for m in before if m is not None)
        costs[-1] += sum(_cost(m, seq_len) for m in after if m is not None)
    return costs


def _cost(module: nn.Module, seq_len: int) -> float:
    """FLOPs per token of a module."""
    count: Any = getattr(module, "flops_per_token", None)
    return float(count(seq_len)) if callable(count) else _products(module)


def _products(module: nn.Module) -> float:
    """FLOPs per token of a matmul with each parameter."""
    return 2.0 * sum(p.numel() for p in module.parameters())


def stage_ranges(costs: Sequence[float], num_stages: int, first_blocks: int = 1) -> list[range]:
    """The blocks of each stage, neighbors only, none empty: the dearest stage is as cheap as can be.

    The first stage has at least `first_blocks`. Of several such splits one with the smallest sum of squares, so the
    other stages are even, too. Costs blocks squared times stages. Raises ValueError for fewer blocks than these need.

    Usage: `stage_ranges([1, 1, 1, 3], 2) == [range(0, 3), range(3, 4)]`.
    """
    if wrong := too_few_layers(len(costs), num_stages, first_blocks=first_blocks):
        raise_problems("", [wrong])
    sums = [0.0, *accumulate(costs)]
    limit = _best_ends(sums, num_stages, first_blocks, math.inf, max)[0]
    # sums of floats in another order differ in the last bits
    limit *= 1 + 1e-9
    _, ends = _best_ends(sums, num_stages, first_blocks, limit, lambda so_far, own: so_far + own**2)
    return [range(start, end) for start, end in zip([0, *ends], ends)]


def _best_ends(
    sums: Sequence[float],
    num_stages: int,
    first_blocks: int,
    limit: float,
    combine: Callable[[float, float], float],
) -> tuple[float, list[int]]:
    """The split with the least `combine` over its stages' costs, none above `limit`: (value, ends)."""
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}  # by the end of the last stage so far
    for _ in range(num_stages):
        found: dict[int, tuple[float, list[int]]] = {}
        for start, (so_far, ends) in best.items():
            for end in range(start + 1 if start else first_blocks, len(sums)):
                own = sums[end] - sums[start]
                value = combine(so_far, own)
                if own <= limit and (end not in found or value < found[end][0]):
                    found[end] = (value, [*ends, end])
        best = found
    return best[len(sums) - 1]


def _ends(parts: Structure, stage: int, count: int) -> set[str]:
    """Names of the modules that a stage has besides blocks."""
    return {*(parts.first if stage == 0 else ()), *(parts.last if stage == count - 1 else ())}


def _prune(model: nn.Module, parts: Structure, ends: set[str], blocks: set[str]) -> None:
    """Remove the children that none of this rank's stages has."""
    for name in parts.ends:
        if name not in ends:
            setattr(model, name, None)
    container: Any = model._modules[parts.container]
    for key in set(container._modules) - blocks:
        del container._modules[key]  # not `del container[key]`, which renumbers a ModuleList


def _stage(model: nn.Module, parts: Structure, ends: set[str], blocks: set[str]) -> nn.Module:
    """A shallow copy of `model` with only these children; modules, parameters and buffers are shared."""
    container = _shallow_copy(getattr(model, parts.container))
    for key in set(container._modules) - blocks:
        del container._modules[key]
    stage = _shallow_copy(model)
    stage._modules |= dict.fromkeys(set(parts.ends) - ends) | {parts.container: container}
    return stage


def _shallow_copy(module: nn.Module) -> nn.Module:
    """A module of the same class and attributes, with hooks and children of its own: FSDP2 and `Pipeline` register
    hooks on each stage, and change its class."""
    twin = object.__new__(type(module))
    for name, value in vars(module).items():
        own = name.startswith("_") and name != "_buffers" and isinstance(value, dict | set)
        vars(twin)[name] = value.copy() if own else value
    return twin


def follow_mode(model: nn.Module) -> None:
    """Put stages into training or eval mode as `model` is: `model.train()` does not reach their copied modules."""
    for stage in stages_of(model):
        for module in (stage, *stage.children()):
            if module not in model._modules.values():
                module.training = model.training


def tied_names(model: nn.Module) -> tuple[str, ...]:
    """Children that the first and the last stage both hold, as `split` found them."""
    names: tuple[str, ...] = vars(model).get("pipeline_tied", ())
    return names


@torch.no_grad()
def sync_tied_gradients(model: nn.Module, meshes: Meshes) -> None:
    """Give both replicas of tied weights the sum of their gradients: once per step, before norm and update.

        loss = pipeline.step(tokens, labels, loss_fn)
        sync_tied_gradients(model, meshes)

    Replicas that begin equal stay equal, bit by bit. Called twice it would count the gradients twice. Cost:
    the first and the last pp rank exchange their shards of these gradients; other ranks, and models
    without tied ends, do nothing.
    """
    tied = list(_tied_parameters(model, meshes))
    if not tied:
        return
    for parameter in tied:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    local = [local_tensor(parameter.grad) for parameter in tied]
    remote = [torch.empty_like(gradient) for gradient in local]

    # point to point: an all-reduce would need a group of the two ends, or all stages to call it
    peer, group = meshes.pp.size - 1 - meshes.pp.rank, meshes.pp.group
    ops = [dist.P2POp(dist.isend, t.contiguous(), group=group, group_peer=peer) for t in local]
    ops += [dist.P2POp(dist.irecv, t, group=group, group_peer=peer) for t in remote]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    for gradient, other in zip(local, remote):
        gradient.add_(other)


def tied_copies(model: nn.Module, meshes: Meshes) -> set[Tensor]:
    """Parameters that a norm over all stages must leave out: the last stage's replicas of tied weights, elsewhere none.

    norm, _ = global_grad_norm(p for p in model.parameters() if p not in tied_copies(model, meshes))
    """
    last = meshes.pp.rank == meshes.pp.size - 1
    return set(_tied_parameters(model, meshes)) if last else set()


def _tied_parameters(model: nn.Module, meshes: Meshes) -> Iterator[nn.Parameter]:
    """Parameters that this rank and another both hold."""
    if meshes.pp.size == 1 or meshes.pp.rank not in (0, meshes.pp.size - 1):
        return
    for name in tied_names(model):
        yield from (p for p in model.get_submodule(name).parameters() if p.requires_grad)
