"""Traffic and time of a step, from FLOPs, bytes and stated overlaps.

Matmuls run at a fitted fraction of the peak. Collectives of tp, ep and cp are exposed (with async_tp half of tp's).
FSDP's collectives run next to matmuls and are hidden by HIDDEN of their time; the rest is exposed. The update reads and
writes weights, gradients and moments once, at the speed of a copy. A pipeline idles (pp - 1) / (m v) of its work while
its first micro-batch arrives and its last one leaves (m micro-batches, v stages on a rank; Megatron-LM, arXiv
2104.04473); schedules that split the backward fill about two thirds of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, prod

from forge_parallel.config import splits_backward
from forge_parallel.plan.candidate import Candidate, Load
from forge_parallel.plan.memory import Memory, group_size
from forge_parallel.plan.trace import BlockTrace

#: Fraction of the time of matmuls that hides FSDP's collectives, and the fraction of these that is exposed in any case.
#: Chosen, as the fractions in topology.py, on the published sweep in test_plan_calibration.py.
HIDDEN, MIN_EXPOSED = 0.3, 0.5
#: Tokens of an expert with which a grouped GEMM has half of its speed: a guess from forge-moe's benchmark.
HALF_SPEED_TOKENS = 400
#: Seconds in which the host launches a block's forward and backward: a lower bound for small models.
LAUNCH_SECONDS = 5e-4
#: Least seconds of a collective inside a node; twice that between nodes.
LATENCY = 25e-6
#: Speed of converted matmuls in float8 over bf16: fitted to torchtitan's 8B on 8 H100.
FLOAT8_SPEEDUP = 1.28
#: memory_budget with which compiled blocks save about as much as selective recomputation does.
SELECTIVE_BUDGET = 0.7


@dataclass(frozen=True)
class Traffic:
    """One axis on one rank. `whole` unsharded bytes pass through collectives in a step, of which each rank receives
    `received`; `crosses` nodes; `seconds` on the hardware, exposed or not; `what` describes the tensors."""

    axis: str
    what: str
    whole: float
    received: float
    crosses: bool
    seconds: float


@dataclass(frozen=True)
class Time:
    """Seconds of one step on the slowest rank: `products` (matmuls), `exposed` communication by axis, pipeline
    `bubble`, optimizer `update`. mfu does not count recomputation."""

    products: float
    exposed: dict[str, float]
    bubble: float
    update: float
    step: float
    tokens_per_second: float
    mfu: float


def stage_traffic(candidate: Candidate, pp_rank: int) -> list[Traffic]:
    """Traffic of the axes with more than one rank, on a pipeline rank."""
    load, m = candidate.load(pp_rank), candidate.num_micro_batches
    fsdp, efsdp = _weights(candidate, load)
    tp, cp, ep = _streams(candidate, load)
    blocks = len(load.kinds)
    # gradients of replicas: an all-reduce is a reduce-scatter and an all-gather, of a shard, once a step
    axes, sizes = candidate.topology.axes(), [group_size(g, candidate) for g in load.groups]
    dense, experts = sum(size.dense for size in sizes), sum(size.experts for size in sizes)
    shards = dense / axes["fsdp"][0] + experts / axes["efsdp"][0]
    replicas = 2 * candidate.reduce * shards

    # per block and micro-batch FSDP gathers twice and reduces once; tp has 2 all-gathers and 2 reduce-scatters each way
    rows = (  # axis, what, whole bytes, collectives of a forward and backward of all blocks
        ("fsdp", "all-gather of weights, reduce-scatter of gradients", fsdp, 3 * m * blocks),
        ("efsdp", "the same of experts", efsdp, 3 * m * blocks),
        ("dp_replicate", "all-reduce of gradient shards", replicas, blocks),
        ("tp", "all-gather and reduce-scatter of tokens", tp * m, 8 * m * blocks),
        ("cp", "keys and values", cp * m, 4 * m * blocks),
        ("ep", "tokens to their experts and back", ep * m, 6 * m * blocks),
        ("pp", "activations and their gradients", _boundaries(candidate, load) * m, 4 * m * len(load.stages)),
    )  # fmt: skip

    found = []
    for axis, what, whole, calls in rows:
        size, crosses = axes[axis][0], candidate.topology.crosses(axis)
        if size > 1 and whole:
            seconds = candidate.topology.seconds(axis, whole, candidate.hardware)
            seconds += calls * LATENCY * (1 + crosses)
            received = whole if axis == "pp" else whole * (size - 1) / size
            found.append(Traffic(axis, what, whole, received, crosses, seconds))
    return found


def step_time(
    candidate: Candidate, memory: Sequence[Memory], traffic: Sequence[Sequence[Traffic]]
) -> Time:
    """Time of the slowest pipeline rank, from the memory and the traffic of each rank."""
    ranks = []
    for rank, (stored, sent) in enumerate(zip(memory, traffic)):
        products = _products(candidate, candidate.load(rank))
        exposed = {row.axis: _exposed(row, candidate, products) for row in sent}
        touched = 2 * (stored.weights + stored.moments) + stored.gradients
        busy = products + sum(exposed.values())
        ranks.append((busy, products, exposed, touched / candidate.hardware.memory_speed))
    busy, products, exposed, update = max(ranks, key=lambda t: t[0] + t[3])

    passes = candidate.num_micro_batches * candidate.config.stages_per_rank
    idle = (candidate.layout.pp - 1) / passes
    bubble = busy * (idle / 3 if splits_backward(candidate.config) else idle)
    step = busy + bubble + update
    needed = 3 * candidate.profile.flops - candidate.profile.first_spared
    ideal = needed * candidate.tokens / candidate.world_size / candidate.hardware.peak
    return Time(products, exposed, bubble, update, step, candidate.tokens / step, ideal / step)


def _exposed(row: Traffic, candidate: Candidate, products: float) -> float:
    """Seconds of an axis that no computation hides."""
    if row.axis in ("fsdp", "efsdp", "dp_replicate"):
        return max(row.seconds - HIDDEN * products, MIN_EXPOSED * row.seconds)
    # a pipeline sends while the next micro-batch is computed
    overlaps = row.axis == "pp" or (row.axis == "tp" and candidate.config.async_tp)
    return row.seconds * (0.5 if overlaps else 1.0)


def _products(candidate: Candidate, load: Load) -> float:
    """Seconds of the matmuls of forward, backward and recomputation of all micro-batches of a rank."""
    c, p = candidate.config, candidate.profile
    sharing = candidate.layout.cp * candidate.layout.tp  # ranks that share a sequence
    tokens = candidate.num_micro_batches * candidate.micro_batch * p.seq_len / sharing
    again = {"none": 0.0, "full": 1.0, "selective": 0.05}[c.recompute] / c.recompute_every
    if c.memory_budget is not None:
        # cheap operators are recomputed first
        again = max(0.0, 1 - c.memory_budget / SELECTIVE_BUDGET)

    blocks = sum(p.kinds[k].flops + _slow_experts(candidate, k) for k in load.kinds)
    ends = 3 * p.head_flops * load.last
    # before the blocks a rank of tp computes all tokens, and a rank of cp full sequences
    ends += (3 * p.first_flops - p.first_spared) * load.first * sharing
    hardware = candidate.hardware
    speed = hardware.peak * (hardware.compiled if candidate.compiled else hardware.eager)
    faster = FLOAT8_SPEEDUP if c.float8 != "none" else 1.0
    least = candidate.num_micro_batches * len(load.kinds) * LAUNCH_SECONDS
    return max(least, tokens * (blocks * (3 + again) / faster + ends) / speed)


def _slow_experts(candidate: Candidate, kind: int) -> float:
    """FLOPs per token that the experts of a block lose to having few tokens each."""
    params = candidate.profile.kinds[kind].params
    stacks = [p for p in params if p.role == "expert" and len(p.shape) == 3]  # (E, D, F) each
    if not stacks:
        return 0.0
    d, experts, top_k = candidate.layout, stacks[0].shape[0], candidate.trace.kinds[kind].top_k
    flops = 2.0 * sum(prod(param.shape) for param in stacks) * top_k / experts
    tokens = candidate.micro_batch * candidate.profile.seq_len / (d.cp * d.tp)
    of_expert = tokens * top_k / experts * d.ep
    return flops * HALF_SPEED_TOKENS / of_expert


def _weights(candidate: Candidate, load: Load) -> tuple[float, float]:
    """Unsharded bytes of FSDP's gathers and reductions in a step, and those of experts with a mesh of their own."""
    if not candidate.wrapped:
        return 0.0, 0.0
    m = candidate.num_micro_batches
    # torch's pipeline stages leave weights gathered and sum gradients at the end
    once = candidate.layout.pp > 1
    gathers = (m if candidate.reshards else 1) if once else m * (2 if candidate.reshards else 1)
    reduces = 1 if once or candidate.storage.sync_once else m
    wire = 1 if candidate.config.float8_all_gather else candidate.compute
    of_block = gathers * wire + reduces * candidate.reduce
    of_ends = (1 if once else m) * candidate.compute + reduces * candidate.reduce

    ends = group_size(load.ends, candidate)
    dense, experts = of_ends * ends.dense, of_ends * ends.experts
    for block in load.blocks:
        dense += of_block * group_size(block, candidate).dense
        experts += of_block * group_size(block, candidate).experts
    has_own_mesh = candidate.layout.ep * candidate.layout.tp > 1
    return (dense, experts) if has_own_mesh else (dense + experts, 0.0)


def _streams(candidate: Candidate, load: Load) -> tuple[float, float, float]:
    """Unsharded bytes of tp, cp and ep for one micro-batch: a forward, a backward, and another forward of fully
    recomputed blocks."""
    again = 1.0 / candidate.config.recompute_every if candidate.config.recompute == "full" else 0.0
    traces = [(candidate.trace.kinds[k], (2.0 + again) * candidate.micro_batch) for k in load.kinds]
    ends = [candidate.trace.first] * load.first + [candidate.trace.last] * load.last
    traces += [(end, 2.0 * candidate.micro_batch) for end in ends]
    tp, cp = (sum(times * trace.sent[axis] for trace, times in traces) for axis in ("tp", "cp"))
    return tp, cp, sum(times * _routed(candidate, trace) for trace, times in traces)


def _routed(candidate: Candidate, block: BlockTrace) -> float:
    """Bytes of one layer's tokens to the ranks of their experts and of the sums back, in one pass.

    A token is sent once to each rank that holds some of its K experts of E: with balanced routing to
    ep (1 - C(E - E/ep, K) / C(E, K)) ranks.
    """
    rows, ep = block.sent["rows"], candidate.layout.ep
    if not rows or ep == 1:
        return 0.0
    top_k, experts = block.top_k, candidate.profile.num_experts
    none = comb(experts - experts // ep, top_k) / comb(experts, top_k)
    return 2 * rows / top_k * ep * (1 - none)


def _boundaries(candidate: Candidate, load: Load) -> float:
    """Bytes to and from neighboring stages for one micro-batch, forward and backward."""
    if candidate.layout.pp == 1 or not load.kinds:
        return 0.0
    stream = candidate.trace.kinds[load.kinds[0]].inputs * candidate.micro_batch
    return stream * (2 * len(load.stages) - int(load.first) - int(load.last))
