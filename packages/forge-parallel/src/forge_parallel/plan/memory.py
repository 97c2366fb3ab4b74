"""Bytes on each rank: exact for stored tensors, traced for saved activations, formulas for transient ones."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod
from typing import NamedTuple

from forge_parallel.axes.fsdp import cuts_inside
from forge_parallel.axes.roles import BY_ROWS
from forge_parallel.plan.candidate import Candidate, Load
from forge_parallel.plan.profile import Part, Row, local_shape
from forge_parallel.stages import splits_backward


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank of a pipeline stage, the first one of its groups, at its fullest moment.

    weights, gradients, moments: shards. activations: saved for `in_flight` micro-batches. recomputed: activations of
    one block, and its transient gradients. gathered: unsharded weights of two neighboring blocks and of modules
    outside blocks, in the compute dtype, with a block's gradients and buffers of collectives. loss: logits, their gradient,
    its workspace. `peak` is the largest of three moments (the loss, a block's backward, the end of the backward),
    each with tensors left from the moment before, and workspaces.
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


#: torch's workspaces for cuBLAS and cuBLASLt, 32 MiB each on Hopper, and as much again for small tensors: ids,
#: losses, norms, tables of positions.
_LIBRARIES = 2.0**27


class PartSize(NamedTuple):
    """Elements of a part on a rank: `local` shards, those of them that are `trained`, and gathered elements of
    `dense` parameters and of `experts`, sharded by tp and ep, with FSDP2's padding, of which `learned` have gradients.
    moments: bytes of the optimizer's state."""

    local: int
    trained: int
    moments: float
    dense: int
    experts: int
    learned: int

    @property
    def whole(self) -> int:
        return self.dense + self.experts


def part_size(part: Part, candidate: Candidate) -> PartSize:
    """The size of a part, counted once per shape of the layout."""

    def count() -> PartSize:
        local = trained = dense = experts = learned = 0
        moments = 0.0
        for row in part.rows:
            numel, is_expert = local_numel(row, candidate), row.role == "expert"
            local += numel
            trained += numel * row.trains
            per_element = candidate.storage.moments if row.moments is None else row.moments
            moments += numel * row.trains * per_element
            dense += numel * _shards(row, candidate) * (not is_expert)
            experts += numel * _shards(row, candidate) * is_expert
            learned += numel * _shards(row, candidate) * row.trains
        return PartSize(local, trained, moments, dense, experts, learned)

    return candidate.profile.once(
        ("part_size", id(part), candidate.layout[2:], candidate.storage.moments), count
    )


def local_numel(row: Row, candidate: Candidate) -> int:
    """Elements of one parameter on the first rank of every axis; FSDP2 rounds a part of dim 0 up, and shards dim 1
    evenly (`axes.fsdp.cuts_inside`)."""
    shape, parts = (
        local_shape(row.shape, row.role, candidate.layout.tp, candidate.layout.ep, row.heads),
        _shards(row, candidate),
    )
    tp = candidate.layout.tp if row.role in BY_ROWS and row.heads == 0 else 1
    if cuts_inside(shape, parts, row.shape[0] if shape else 1, tp):
        return prod(shape) // parts
    return ceil(shape[0] / parts) * prod(shape[1:]) if shape else 1


def _shards(row: Row, candidate: Candidate) -> int:
    """Number of FSDP2's shards of a parameter."""
    return candidate.topology.axes()["efsdp" if row.role == "expert" else "fsdp"][0]


def stage_memory(candidate: Candidate, pp_rank: int) -> Memory:
    """Memory of a rank of pipeline stage(s) `pp_rank`."""
    load, s = candidate.load(pp_rank), candidate.storage
    parts = (
        [] if candidate.config.cpu_offload else [part_size(part, candidate) for part in load.parts]
    )
    trained = sum(part.trained for part in parts)
    frozen = sum(part.local for part in parts) - trained
    weights = trained * s.weights + frozen * (s.weights if s.frozen is None else s.frozen)
    gradients, moments = trained * s.gradients, sum(part.moments for part in parts)
    in_flight = micro_batches_in_flight(candidate, pp_rank)
    passes = _in_flight(candidate, pp_rank)
    activations = candidate.micro_batch * _saved_activations(candidate, load, passes)
    recomputed = candidate.micro_batch * _transient(candidate, load)
    gathered, buffers, ends = _gathered(candidate, load)
    loss = _loss(candidate) if load.last else 0.0
    static = weights + moments + gathered + _LIBRARIES
    # in the first micro-batch gradients grow while activations shrink
    if candidate.layout.pp > 1:
        # stages keep gradients whole, and reduce them behind the last backward; if no more micro-batches are made
        # than are in flight, all go forward before one goes back
        before = _whole_gradients(candidate, load)
        after = max(before, gradients)
        before *= candidate.num_micro_batches > in_flight
    else:
        after = gradients
        before = gradients + _unreduced(candidate, load)
        before *= candidate.num_micro_batches > 1
    peak = static + max(
        before + activations + loss,
        max(before + activations, after) + recomputed + buffers,
        after + ends,
    )
    return Memory(weights, gradients, moments, activations, recomputed,
                  gathered + buffers, loss, peak, in_flight)  # fmt: skip


def micro_batches_in_flight(candidate: Candidate, pp_rank: int) -> float:
    """Micro-batches of which a rank keeps activations at once; halves where it has two stages."""
    counts = _in_flight(candidate, pp_rank)
    return sum(counts) / len(counts)


def _in_flight(candidate: Candidate, pp_rank: int) -> list[float]:
    """The same for each of the rank's stages, in the order of depth.

    GPipe keeps all, 1F1B as many as there are ranks from this one on, the interleaved ones their warm-up
    (torch: 2 (pp - rank - 1) + (stages - 1) pp + 1 passes), in which stages have about equal parts. With zero bubbles it
    is pp - rank - 1 for the double, and the weights' gradients of `rank` passes wait: pp micro-batches on every rank. In
    a V the stage of the first half has most of them; a test counts them in torch's tables.
    """
    pp, m, name = candidate.layout.pp, candidate.num_micro_batches, candidate.config.pp_schedule
    if pp == 1:
        return [1.0]
    stages = candidate.config.stages_per_rank
    warm_up = 2 * (pp - pp_rank - 1) + (stages - 1) * pp + 1
    in_a_v = {
        "zbv_zero_bubble": (2 * pp - pp_rank - 1, pp_rank + 1),
        "dualpipev": (2 * pp - pp_rank, pp_rank + 1),
    }
    if name in in_a_v:
        return [float(min(m, count)) for count in in_a_v[name]]
    return stages * [float(min(m, {
        "gpipe": m,
        "1f1b": pp - pp_rank,
        "interleaved_1f1b": warm_up / stages,
        "interleaved_zero_bubble": pp,
    }[name]))]  # fmt: skip


def _saved_activations(candidate: Candidate, load: Load, in_flight: list[float]) -> float:
    """Bytes of activations saved on this rank for one row of each micro-batch in flight."""
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
                saved = block.under(mode, candidate.compiled)
            total += count * saved
        if candidate.layout.pp > 1 and stage:
            total += count * t.kinds[stage[-1]].inputs  # its output waits for its gradient
    return total


def _transient(candidate: Candidate, load: Load) -> float:
    """Per row: recomputed activations of a block, and two gradients of its largest tensor; where weights' gradients are
    computed apart, those of all outputs of products of a stage, which they wait with."""
    kinds = [candidate.trace.kinds[k] for k in set(load.kinds)]
    mode, compiled = candidate.config.recompute, candidate.compiled
    again = (
        max(0, k.under("none", compiled) - k.under(mode, compiled)) + 2 * k.largest for k in kinds
    )
    waits = 0
    if candidate.layout.pp > 1 and splits_backward(candidate.config):
        kept = [[candidate.trace.kinds[k] for k in stage] for stage in load.stages]
        waits = max(sum(k.selective - k.inputs for k in stage) for stage in kept)
    return max(again, default=0) + waits


def _gathered(candidate: Candidate, load: Load) -> tuple[float, float, float]:
    """(gathered weights while blocks run, unsharded gradients and buffers of a block's backward, those of modules
    outside blocks at the end of the backward)."""
    if not candidate.wrapped:
        return 0.0, 0.0, 0.0
    s, d = candidate.storage, candidate.layout
    sharded, several = d.dp_shard * d.cp > 1, candidate.num_micro_batches > 1
    blocks = [part_size(block, candidate) for block in load.blocks]
    sizes = sorted((block.whole for block in blocks), reverse=True)
    largest = max((block.learned for block in blocks), default=0)
    ends = part_size(load.ends, candidate)
    behind = part_size(candidate.profile.ends(False, load.last), candidate).learned
    # torch's pipeline stages keep weights gathered to the last backward
    # copies of weights that are frozen in 16 bits exist only while they are used, on one rank, too
    reshards = (candidate.reshards or s.frozen == 2) and d.pp == 1
    gathered = float((sum(sizes[:2] if reshards else sizes) + ends.whole) * candidate.compute)
    if several and s.sync_once and sharded and d.pp == 1:
        gathered += (sum(sizes) + ends.whole) * candidate.compute
    # gradients, the input of their reduce-scatter, and the output of the next all-gather
    in_next, out = max(sizes, default=0) * candidate.compute, candidate.compute + candidate.reduce
    buffers = (in_next + largest * out) * sharded
    return (
        gathered,
        buffers + behind * candidate.compute,
        ends.learned * out,
    )


def _whole_gradients(candidate: Candidate, load: Load) -> float:
    """Unsharded gradients of a pipeline rank, in the dtype in which they are reduced."""
    parts = [*load.blocks, load.ends] if candidate.wrapped else []
    return float(sum(part_size(part, candidate).learned for part in parts) * candidate.reduce)


def _unreduced(candidate: Candidate, load: Load) -> float:
    """The input of the last reduce-scatter outside blocks: FSDP2 frees it in the next backward."""
    if not candidate.wrapped or candidate.layout.pp > 1 or candidate.storage.sync_once:
        return 0.0
    return float(part_size(load.ends, candidate).learned * candidate.reduce)


def _loss(candidate: Candidate) -> float:
    """Logits of a micro-batch, their gradient, and the blocks in which the loss is computed."""
    s, logits = candidate.storage, candidate.trace.logits * candidate.micro_batch
    if s.fused_loss:
        return _fused_loss(candidate)
    if s.whole_logits:
        logits *= candidate.layout.tp
    beside = candidate.compute if s.loss is None else s.loss
    return logits * (candidate.compute + beside) + min(s.workspace, logits * 8)


def _fused_loss(candidate: Candidate) -> float:
    """Gradients of the head's input and, in fp32, of its weight, of the loss of each token ahead; beside them that of the
    weight in the dtype in which the backward hands it on. The blocks of logits are gone by then, and smaller."""
    rows = candidate.profile.ends(
        False, True
    ).rows  # modules for tokens ahead are among them, and smaller
    weight = max(local_numel(row, candidate) * _shards(row, candidate) for row in rows)
    stream = max(kind.inputs for kind in candidate.trace.kinds.values()) * candidate.micro_batch
    losses = 1 + candidate.profile.ahead
    return losses * (stream + weight * 4) + weight * candidate.compute
