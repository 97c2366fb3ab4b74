"""How long a step takes, from FLOPs, bytes and stated overlaps.

Products run at a fitted part of the peak. Collectives of tp, ep and cp are waited for (with async_tp half of
tp's); of FSDP's, which run beside products, HIDDEN of the time of the products hides them and the rest is
waited for. The update reads and writes weights, gradients and moments once, at a copy's speed. A pipeline
waits (pp - 1) / (m v) of its work for its first micro-batch to arrive and its last to leave (m micro-batches,
v stages on a rank); schedules that split the backward fill about two thirds of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from forge_parallel.plan.candidate import Candidate, Load
from forge_parallel.plan.memory import Memory
from forge_parallel.plan.traffic import Traffic
from forge_parallel.stages import splits_backward

#: Share of the products' time that hides FSDP's collectives, and the share of these that is felt anyway.
HIDDEN, FELT = 0.3, 0.5
#: Rows of an expert with which a grouped product has half of its speed: a guess from forge-moe's benchmark.
FEW = 400
#: Seconds in which the host launches a block's forward and backward: a lower bound for small models.
LAUNCH = 5e-4
#: Products in float8 over bf16, where they are converted: fitted to torchtitan's 8B, 8 H100.
FLOAT8 = 1.28


@dataclass(frozen=True)
class Time:
    """Seconds of one step on the slowest rank, by what it waits for; mfu counts no recomputation."""

    products: float
    exposed: dict[str, float]
    bubble: float
    update: float
    step: float
    tokens_per_second: float
    mfu: float


def step_time(
    candidate: Candidate, memory: Sequence[Memory], traffic: Sequence[Sequence[Traffic]]
) -> Time:
    """The step of the slowest pipeline rank, from the blocks and the traffic of each rank."""
    ranks = []
    for rank, (stored, sent) in enumerate(zip(memory, traffic)):
        products = _products(candidate, candidate.load(rank))
        exposed = {row.axis: _exposed(row, candidate, products) for row in sent}
        touched = 2 * (stored.weights + stored.moments) + stored.gradients
        busy = products + sum(exposed.values())
        ranks.append((busy, products, exposed, touched / candidate.hardware.memory_speed))
    busy, products, exposed, update = max(ranks, key=lambda t: t[0] + t[3])
    idle = (candidate.layout.pp - 1) / (
        candidate.num_micro_batches * candidate.config.stages_per_rank
    )
    bubble = busy * (idle / 3 if splits_backward(candidate.config) else idle)
    step = busy + bubble + update
    needed = 3 * candidate.profile.flops - candidate.profile.first_spared
    ideal = needed * candidate.tokens / candidate.world_size / candidate.hardware.peak
    return Time(products, exposed, bubble, update, step, candidate.tokens / step, ideal / step)


def _exposed(row: Traffic, candidate: Candidate, products: float) -> float:
    """Seconds of an axis that are waited for."""
    if row.axis in ("fsdp", "efsdp", "dp_replicate"):
        return max(row.seconds - HIDDEN * products, FELT * row.seconds)
    # a pipeline sends while the next micro-batch is computed
    beside = row.axis == "pp" or (row.axis == "tp" and candidate.config.async_tp)
    return row.seconds * (0.5 if beside else 1.0)


def _slow_experts(candidate: Candidate, kind: int) -> float:
    """FLOPs per token that experts lose to having few rows each: with FEW rows half of their speed."""
    part, block = candidate.profile.kinds[kind], candidate.trace.kinds[kind]
    stacks = [row for row in part.rows if row.role == "expert" and len(row.shape) == 3]
    if not stacks:
        return 0.0
    d, experts, slots = candidate.layout, stacks[0].shape[0], block.slots
    flops = 2.0 * sum(prod(row.shape) for row in stacks) * slots / experts
    rows = (
        candidate.micro_batch * candidate.profile.seq_len / (d.cp * d.tp) * slots / experts * d.ep
    )
    return flops * FEW / rows


def _products(candidate: Candidate, load: Load) -> float:
    """Seconds of forward, backward and recomputation of all micro-batches of a rank."""
    c, p = candidate.config, candidate.profile
    rows = candidate.num_micro_batches * candidate.micro_batch
    tokens = rows * p.seq_len / (candidate.layout.cp * candidate.layout.tp)
    again = {"none": 0.0, "full": 1.0, "selective": 0.05}[c.recompute] / c.recompute_every
    if c.memory_budget is not None:
        again = max(0.0, 1 - c.memory_budget / 0.7)  # cheap operators are recomputed first
    blocks = sum(p.kinds[k].flops + _slow_experts(candidate, k) for k in load.kinds)
    ends = 3 * p.head_flops * load.last
    # a rank of tp computes what is before the blocks for all tokens, and a rank of cp for whole rows
    shared = candidate.layout.cp * candidate.layout.tp
    ends += (3 * p.first_flops - p.first_spared) * load.first * shared
    share = candidate.hardware.compiled if candidate.compiled else candidate.hardware.eager
    speed = candidate.hardware.peak * share
    faster = FLOAT8 if c.float8 != "none" else 1.0
    least = candidate.num_micro_batches * len(load.kinds) * LAUNCH
    return max(least, tokens * (blocks * (3 + again) / faster + ends) / speed)
