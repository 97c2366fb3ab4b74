"""Bytes that each axis carries in one step."""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

from forge_parallel.plan.candidate import Candidate, Load
from forge_parallel.plan.memory import part_size
from forge_parallel.plan.trace import BlockTrace

#: The least that a collective takes; twice that between nodes.
LATENCY = 25e-6


@dataclass(frozen=True)
class Traffic:
    """One axis on one rank. `whole` bytes pass through collectives in a step, of which each rank receives
    `received`; `crosses` nodes; `seconds` on the hardware, overlapped or not; `what` describes the tensors."""

    axis: str
    what: str
    whole: float
    received: float
    crosses: bool
    seconds: float


def stage_traffic(candidate: Candidate, pp_rank: int) -> list[Traffic]:
    """The axes with more than one rank, on a rank of pipeline stage(s) `pp_rank`."""
    load, m = candidate.load(pp_rank), candidate.num_micro_batches
    fsdp, efsdp = _weights(candidate, load)
    tp, cp, ep = _streams(candidate, load)
    blocks = len(load.blocks)
    rows = (  # axis, what, whole bytes, collectives of a forward and backward of all blocks
        ("fsdp", "all-gather of weights, reduce-scatter of gradients", fsdp, 3 * m * blocks),
        ("efsdp", "the same of experts", efsdp, 3 * m * blocks),
        ("dp_replicate", "all-reduce of gradient shards", _copies(candidate, load), blocks),
        ("tp", "all-gather and reduce-scatter of tokens", tp * m, 8 * m * blocks),
        ("cp", "keys and values", cp * m, 4 * m * blocks),
        ("ep", "tokens to their experts and back", ep * m, 6 * m * blocks),
        ("pp", "activations and their gradients", _boundaries(candidate, load) * m, 4 * m * len(load.stages)),
    )  # fmt: skip
    found = []
    for axis, what, whole, calls in rows:
        size, crosses = candidate.topology.axes()[axis][0], candidate.topology.crosses(axis)
        if size > 1 and whole:
            seconds = candidate.topology.seconds(axis, whole, candidate.hardware)
            seconds += calls * LATENCY * (1 + crosses)
            received = whole if axis == "pp" else whole * (size - 1) / size
            found.append(Traffic(axis, what, whole, received, crosses, seconds))
    return found


def _weights(candidate: Candidate, load: Load) -> tuple[float, float]:
    """Unsharded bytes of FSDP's gathers and reductions in a step, and those of experts with a mesh of their own."""
    if not candidate.wrapped:
        return 0.0, 0.0
    m = candidate.num_micro_batches
    # torch's stages leave weights gathered and sum gradients at the end
    once = candidate.layout.pp > 1
    gathers = (m if candidate.reshards else 1) if once else m * (2 if candidate.reshards else 1)
    reduces = 1 if once or candidate.storage.sync_once else m
    wire = 1 if candidate.config.float8_all_gather else candidate.compute
    of_block = gathers * wire + reduces * candidate.reduce
    of_ends = (1 if once else m) * candidate.compute + reduces * candidate.reduce
    ends = part_size(load.ends, candidate)
    dense, experts = of_ends * ends.dense, of_ends * ends.experts
    for block in load.blocks:
        dense += of_block * part_size(block, candidate).dense
        experts += of_block * part_size(block, candidate).experts
    apart = candidate.layout.ep * candidate.layout.tp > 1
    return (dense, experts) if apart else (dense + experts, 0.0)


def _copies(candidate: Candidate, load: Load) -> float:
    """An all-reduce is a reduce-scatter and an all-gather, of a shard, once a step."""
    axes, numbers = candidate.topology.axes(), [part_size(part, candidate) for part in load.parts]
    dense, experts = (sum(n.dense for n in numbers), sum(n.experts for n in numbers))
    return 2 * candidate.reduce * (dense / axes["fsdp"][0] + experts / axes["efsdp"][0])


def _streams(candidate: Candidate, load: Load) -> tuple[float, float, float]:
    """Unsharded bytes of tp, cp and ep for one micro-batch, all passes: a forward, a backward, and another forward of
    fully recomputed blocks."""
    again = 1.0 / candidate.config.recompute_every if candidate.config.recompute == "full" else 0.0
    parts = [(candidate.trace.kinds[k], (2.0 + again) * candidate.micro_batch) for k in load.kinds]
    parts += [(part, 2.0 * candidate.micro_batch) for part in load.traced_ends(candidate.trace)]
    tp, cp = (sum(times * block.sent[axis] for block, times in parts) for axis in ("tp", "cp"))
    return tp, cp, sum(times * _travel(candidate, block) for block, times in parts)


def _travel(candidate: Candidate, block: BlockTrace) -> float:
    """Bytes of one layer's tokens to the ranks of their experts and of the sums back, one pass.

    A token is sent once to each rank that holds some of its experts; with balanced choices of K among E experts to
    ep (1 - C(E - E/ep, K) / C(E, K)) ranks.
    """
    rows, ep = block.sent["rows"], candidate.layout.ep
    if not rows or ep == 1:
        return 0.0
    slots, experts = block.slots, candidate.profile.num_experts
    none = comb(experts - experts // ep, slots) / comb(experts, slots)
    return 2 * rows / slots * ep * (1 - none)


def _boundaries(candidate: Candidate, load: Load) -> float:
    """Bytes to and from neighboring stages for one micro-batch, forward and backward."""
    if candidate.layout.pp == 1 or not load.kinds:
        return 0.0
    stream = candidate.trace.kinds[load.kinds[0]].inputs * candidate.micro_batch
    borders = 2 * len(load.stages) - int(load.first) - int(load.last)
    return stream * borders
