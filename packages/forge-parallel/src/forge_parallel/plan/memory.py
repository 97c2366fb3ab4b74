"""Memory of each rank: exact for stored tensors, traced for saved activations, formulas for transient tensors."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod
from typing import NamedTuple

import torch

from forge_parallel._shared.cross_entropy import block_size
from forge_parallel.axes.fsdp import OWN_UNIT, shards_dim_1
from forge_parallel.axes.precision import BATCH
from forge_parallel.axes.roles import BY_ROWS
from forge_parallel.config import splits_backward
from forge_parallel.plan.candidate import Candidate, Load
from forge_parallel.plan.profile import ParamGroup, ParamInfo, local_shape


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank of a pipeline stage, the first rank of each of its groups, at its peak.

    weights, gradients, moments  shards
    activations   saved for `in_flight` micro-batches
    recomputed    activations of one block, and its transient gradients
    gathered      unsharded weights of two neighboring blocks and of modules outside blocks, in the compute dtype, with
                  a block's gradients and the buffers of collectives; an embedding or a head that FSDP2 wraps by itself
                  is not gathered while blocks run
    loss          logits, their gradient, its workspace
    peak          largest of four moments: the loss, a block's backward, the casts of gradients in one process, the end of
                  the backward, each with tensors left from the moment before, and workspaces
    """

    weights: float
    gradients: float
    moments: float
    activations: float
    recomputed: float
    gathered: float
    loss: float
    peak: float
    in_flight: float


# Workspaces of cuBLAS and cuBLASLt, 32 MiB each on Hopper, and as much again for small tensors: ids, losses, norms,
# tables of positions.
_LIBRARIES = 2.0**27


class GroupSize(NamedTuple):
    """Elements of a ParamGroup on one rank.

    local    of its shards, of which `trained` belong to trained parameters
    moments  bytes of the optimizer's state
    dense    gathered, of dense parameters, with FSDP2's padding
    experts  gathered, of this rank's experts
    learned  of `dense` and `experts`, those with gradients
    """

    local: int
    trained: int
    moments: float
    dense: int
    experts: int
    learned: int

    @property
    def gathered(self) -> int:
        """Elements after FSDP's all-gather; tp and ep stay sharded."""
        return self.dense + self.experts


def group_size(group: ParamGroup, candidate: Candidate) -> GroupSize:
    """Size of a group on a rank, computed once per shape of the layout."""

    def count() -> GroupSize:
        local = trained = dense = experts = learned = 0
        moments = 0.0
        for param in group.params:
            numel = local_numel(param, candidate)
            gathered = numel * _shards(param, candidate)
            local += numel
            trained += numel * param.trains
            per_element = candidate.storage.moments if param.moments is None else param.moments
            moments += numel * param.trains * per_element
            dense += gathered * (param.role != "expert")
            experts += gathered * (param.role == "expert")
            learned += gathered * param.trains
        return GroupSize(local, trained, moments, dense, experts, learned)

    key = ("group_size", id(group), candidate.layout[2:], candidate.storage.moments)
    return candidate.profile.once(key, count)


def local_numel(param: ParamInfo, candidate: Candidate) -> int:
    """Elements of a parameter's shard on the first rank of every axis.

    FSDP2 rounds a shard of dim 0 up, and shards dim 1 evenly (`axes.fsdp.shards_dim_1`).
    """
    d = candidate.layout
    shape = local_shape(param.shape, param.role, d.tp, d.ep, param.heads)
    shards = _shards(param, candidate)
    tp = d.tp if param.role in BY_ROWS and param.heads == 0 else 1
    if shards_dim_1(shape, shards, param.shape[0] if shape else 1, tp):
        return prod(shape) // shards
    return ceil(shape[0] / shards) * prod(shape[1:]) if shape else 1


def _trained(param: ParamInfo) -> int:
    """Elements of a parameter that has gradients."""
    return prod(param.shape) * param.trains


def _shards(param: ParamInfo, candidate: Candidate) -> int:
    """Number of FSDP2's shards of a parameter."""
    return candidate.topology.axes()["efsdp" if param.role == "expert" else "fsdp"][0]


def stage_memory(candidate: Candidate, pp_rank: int) -> Memory:
    """Memory of a pipeline rank."""
    load, s = candidate.load(pp_rank), candidate.storage
    sizes = [group_size(group, candidate) for group in load.groups]
    stored = [] if candidate.config.cpu_offload else sizes
    trained = sum(size.trained for size in stored)
    frozen = sum(size.local for size in stored) - trained
    weights = trained * s.weights + frozen * (s.weights if s.frozen is None else s.frozen)
    gradients, moments = trained * s.gradients, sum(size.moments for size in stored)

    passes = micro_batches_in_flight(candidate, pp_rank)
    in_flight = sum(passes) / len(passes)
    activations = candidate.micro_batch * _saved_activations(candidate, load, passes)
    recomputed = candidate.micro_batch * _transient(candidate, load)
    gathered = _gathered(candidate, load)
    loss = _loss(candidate) if load.last else 0.0
    static = weights + moments + gathered.blocks + _LIBRARIES

    # gradients `before` the last backward and `after` it; in the first micro-batch they grow while activations shrink
    reduced = candidate.reduce if candidate.wrapped else 0
    if candidate.layout.pp > 1:
        # torch's stages keep gradients unsharded, and reduce them after the last backward; if no more micro-batches
        # are run than are in flight, all forwards come before the first backward
        before = float(sum(size.learned for size in sizes) * reduced)
        after = max(before, gradients)
        before *= candidate.num_micro_batches > in_flight
    else:
        # FSDP2 frees the input of the last reduce-scatter, outside blocks, in the next backward
        after = float(gradients)
        before = after + (0 if s.sync_once else gathered.waits)
        before *= candidate.num_micro_batches > 1
    peak = static + max(
        before + activations + loss + gathered.head,
        max(before + activations, after) + recomputed + gathered.buffers,
        before + gathered.uncast,
        after + gathered.ends,
    )
    return Memory(weights, gradients, moments, activations, recomputed,
                  gathered.blocks + gathered.buffers, loss, peak, in_flight)  # fmt: skip


def micro_batches_in_flight(candidate: Candidate, pp_rank: int) -> list[float]:
    """Micro-batches whose activations a rank keeps at once, for each of its stages in order of depth.

    GPipe keeps all, 1F1B one for each rank from this one on, the interleaved schedules their warm-up: torch has
    2 (pp - rank - 1) + (stages - 1) pp + 1 passes, about equally many of each stage. With zero bubbles the first term is
    pp - rank - 1, and the weight gradients of `rank` passes wait: pp micro-batches on every rank. In a V the stage of the
    first half keeps more; a test counts both in torch's tables.
    """
    pp, m, name = candidate.layout.pp, candidate.num_micro_batches, candidate.config.pp_schedule
    if pp == 1:
        return [1.0]
    in_a_v = {
        "zbv_zero_bubble": (2 * pp - pp_rank - 1, pp_rank + 1),
        "dualpipev": (2 * pp - pp_rank, pp_rank + 1),
    }
    if name in in_a_v:
        return [float(min(m, count)) for count in in_a_v[name]]

    stages = candidate.config.stages_per_rank
    warm_up = 2 * (pp - pp_rank - 1) + (stages - 1) * pp + 1
    counts = {
        "gpipe": m,
        "1f1b": pp - pp_rank,
        "interleaved_1f1b": warm_up / stages,
        "interleaved_zero_bubble": pp,
    }
    return stages * [float(min(m, counts[name]))]


def _saved_activations(candidate: Candidate, load: Load, in_flight: list[float]) -> float:
    """Bytes of activations saved on this rank, for one sequence of each micro-batch in flight."""
    c, t = candidate.config, candidate.trace
    total = t.shared * sum(in_flight) / len(in_flight)
    total += t.first.saved * load.first * in_flight[0] + t.last.saved * load.last * in_flight[-1]

    for count, stage in zip(in_flight, load.stages, strict=True):
        for i, kind in enumerate(stage):
            block = t.kinds[kind]
            if c.memory_budget is not None:
                saved = block.inputs + c.memory_budget * (block.compiled - block.inputs)
            else:
                mode = "none" if i % c.recompute_every else c.recompute
                saved = block.saved_under(mode, candidate.compiled)
            total += count * saved
        if candidate.layout.pp > 1 and stage:
            total += count * t.kinds[stage[-1]].inputs  # the stage's output waits for its gradient
    return total


def _transient(candidate: Candidate, load: Load) -> float:
    """Bytes per sequence in the backward of one block: recomputed activations, and two gradients of its largest tensor.

    A schedule that computes weight gradients apart also keeps the outputs of all matmuls of a stage until then.
    """
    kinds = [candidate.trace.kinds[k] for k in set(load.kinds)]
    mode, compiled = candidate.config.recompute, candidate.compiled
    again = (
        max(0, k.saved_under("none", compiled) - k.saved_under(mode, compiled)) + 2 * k.largest
        for k in kinds
    )
    waits = 0
    if candidate.layout.pp > 1 and splits_backward(candidate.config):
        kept = [[candidate.trace.kinds[k] for k in stage] for stage in load.stages]
        waits = max(sum(k.selective - k.inputs for k in stage) for stage in kept)
    return max(again, default=0) + waits


class Gathered(NamedTuple):
    """Bytes of unsharded weights and gradients.

    blocks   weights while blocks run
    head     more of them during the loss: of a head that is a unit of its own
    buffers  unsharded gradients and buffers of collectives in a block's backward
    ends     those of modules outside blocks at the end of the backward
    waits    the input of the last reduce-scatter
    uncast   all gradients in the compute dtype, and the largest in fp32: where one process casts its parameters before the
             forward, autograd casts their gradients after the backward of all blocks
    """

    blocks: float
    head: float
    buffers: float
    ends: float
    waits: float
    uncast: float = 0.0


def _gathered(candidate: Candidate, load: Load) -> Gathered:
    """Weights that are gathered on a rank, with the gradients and buffers of their collectives."""
    if not candidate.wrapped:
        return Gathered(0.0, 0.0, 0.0, 0.0, 0.0)
    s, d, compute = candidate.storage, candidate.layout, candidate.compute
    is_sharded = d.dp_shard * d.cp > 1
    blocks = [group_size(block, candidate) for block in load.blocks]
    sizes = sorted((block.gathered for block in blocks), reverse=True)
    ends = group_size(load.ends, candidate)

    # torch's pipeline stages keep weights gathered until the last backward; copies of weights that are frozen in 16
    # bits exist only while they are used, on one rank too
    reshards = (candidate.reshards or s.frozen == 2) and d.pp == 1
    embedding, head = _own_units(candidate, load) if reshards else (_NOTHING, _NOTHING)
    outside = ends.gathered - embedding.gathered - head.gathered
    gathered = float((sum(sizes[:2] if reshards else sizes) + outside) * compute)
    if candidate.num_micro_batches > 1 and s.sync_once and is_sharded and d.pp == 1:
        gathered += (sum(sizes) + ends.gathered) * compute

    # gradients, the input of their reduce-scatter, and the output of the next all-gather
    out = compute + candidate.reduce
    learned = max((block.learned for block in blocks), default=0)
    buffers = (max(sizes, default=0) * compute + learned * out) * is_sharded
    # gradients of modules after the blocks; of a head by itself the input of its reduce-scatter
    after_blocks = group_size(candidate.profile.ends(False, load.last), candidate).learned
    pending = (after_blocks - head.learned) * compute + head.learned * candidate.reduce
    last = ends.learned - head.learned
    if candidate.casts:
        return Gathered(gathered, 0.0, pending, *_at_casts(candidate, load))
    return Gathered(
        gathered,
        head.gathered * compute,
        buffers + pending,
        last * out,
        float(last * candidate.reduce),
    )


_NOTHING = GroupSize(0, 0, 0.0, 0, 0, 0)


def _at_casts(candidate: Candidate, load: Load) -> tuple[float, float, float]:
    """`ends`, `waits` and `uncast` where one process casts parameters: their gradients are cast from the last to the first.

    In later micro-batches a gradient in fp32 is new, and added to the sum.
    """
    compute = candidate.compute
    learned = sum(group_size(group, candidate).learned for group in load.groups)
    # the largest in fp32; or of a tied table, which takes as much, two gradients next to their sum
    largest = max(_trained(p) for group in load.groups for p in group.params)
    uncast = learned * compute + max(largest, min(BATCH, learned)) * 4

    table = max((_trained(p) for p in load.ends.params), default=0)
    added = 4 * (candidate.num_micro_batches > 1)
    return float(table * (compute + added)), 0.0, float(uncast)


def _own_units(candidate: Candidate, load: Load) -> tuple[GroupSize, GroupSize]:
    """The embedding and the head, if FSDP2 wraps them by themselves and frees them (`axes.fsdp.apply_fsdp`).

    The root keeps what other modules read. Trainers that sum unsharded gradients wrap no such units.
    """
    groups = candidate.profile.units_of_ends(load.first, load.last)[:2]
    sizes = [group_size(group, candidate) for group in groups]
    is_own = [size.gathered >= OWN_UNIT and not candidate.storage.sync_once for size in sizes]
    embedding, head = (size if own else _NOTHING for size, own in zip(sizes, is_own, strict=True))
    return embedding, head


def _loss(candidate: Candidate) -> float:
    """Bytes of the loss: logits of a micro-batch, their gradient, and the blocks in which it is computed.

    A fused loss keeps the gradients of the head's input and weight for the loss of each predicted token, that of the weight
    in fp32 if there are several blocks; next to them is a block of logits, or the weight's gradient in the compute dtype.
    """
    s, compute = candidate.storage, candidate.compute
    logits = candidate.trace.logits * candidate.micro_batch
    if s.fused_loss:
        # modules of multi-token prediction are among these parameters, and smaller
        params = candidate.profile.ends(False, True).params
        sizes = [(local_numel(p, candidate) * _shards(p, candidate), p.shape[-1]) for p in params]
        weight, dim = max(sizes)
        ids = weight // dim
        block = block_size(ids, dim, torch.float32, torch.bfloat16, "cuda") * ids
        inputs = max(kind.inputs for kind in candidate.trace.kinds.values()) * candidate.micro_batch
        kept = inputs + weight * (4 if logits > block else compute)
        block = min(block, logits)
        workspace = block * compute + min(s.workspace, block * 8)
        return (1 + candidate.profile.ahead) * kept + max(workspace, weight * compute)

    if s.whole_logits:
        logits *= candidate.layout.tp
    # the workspace holds fp32 logits and their fp32 gradient, in blocks
    gradient = compute if s.loss is None else s.loss
    return logits * (compute + gradient) + min(s.workspace, logits * 8)
