"""What each axis carries in one step."""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

from forge_parallel.plan.case import Case, Load
from forge_parallel.plan.memory import held
from forge_parallel.plan.trace import Kept

#: The least that a collective takes; twice that between nodes.
LATENCY = 25e-6


@dataclass(frozen=True)
class Traffic:
    """One axis on one rank. `whole` bytes pass through collectives in a step, of which each rank receives
    `received`; `crosses` nodes; `seconds` on the hardware, overlapped or not; `what` it is."""

    axis: str
    what: str
    whole: float
    received: float
    crosses: bool
    seconds: float


def stage_traffic(case: Case, pp_rank: int) -> list[Traffic]:
    """The axes with more than one rank, on a rank of pipeline stage(s) `pp_rank`."""
    load, m = case.load(pp_rank), case.num_micro_batches
    fsdp, efsdp = _weights(case, load)
    tp, cp, ep = _streams(case, load)
    blocks = len(load.blocks)
    rows = (  # axis, what, whole bytes, collectives of a forward and backward of all blocks
        ("fsdp", "all-gather of weights, reduce-scatter of gradients", fsdp, 3 * m * blocks),
        ("efsdp", "the same of experts", efsdp, 3 * m * blocks),
        ("dp_replicate", "all-reduce of gradient shards", _copies(case, load), blocks),
        ("tp", "all-gather and reduce-scatter of tokens", tp * m, 8 * m * blocks),
        ("cp", "keys and values", cp * m, 4 * m * blocks),
        ("ep", "tokens to their experts and back", ep * m, 6 * m * blocks),
        ("pp", "activations and their gradients", _boundaries(case, load) * m, 4 * m * len(load.stages)),
    )  # fmt: skip
    found = []
    for axis, what, whole, calls in rows:
        size, crosses = case.topology.axes()[axis][0], case.topology.crosses(axis)
        if size > 1 and whole:
            seconds = case.topology.seconds(axis, whole, case.hardware)
            seconds += calls * LATENCY * (1 + crosses)
            received = whole if axis == "pp" else whole * (size - 1) / size
            found.append(Traffic(axis, what, whole, received, crosses, seconds))
    return found


def _weights(case: Case, load: Load) -> tuple[float, float]:
    """Whole bytes of FSDP's gathers and reductions in a step, and those of experts where they lie apart."""
    if not case.wrapped:
        return 0.0, 0.0
    m = case.num_micro_batches
    once = case.layout.pp > 1  # torch's stages leave weights gathered and sum gradients at the end
    gathers = (m if case.reshards else 1) if once else m * (2 if case.reshards else 1)
    reduces = 1 if once or case.storage.sync_once else m
    wire = 1 if case.config.float8_all_gather else case.compute
    of_block = gathers * wire + reduces * case.reduce
    of_ends = (1 if once else m) * case.compute + reduces * case.reduce
    ends = held(load.ends, case)
    dense, experts = of_ends * ends.dense, of_ends * ends.experts
    for block in load.blocks:
        dense += of_block * held(block, case).dense
        experts += of_block * held(block, case).experts
    apart = case.layout.ep * case.layout.tp > 1
    return (dense, experts) if apart else (dense + experts, 0.0)


def _copies(case: Case, load: Load) -> float:
    """An all-reduce is a reduce-scatter and an all-gather, of a shard, once a step."""
    axes, numbers = case.topology.axes(), [held(part, case) for part in load.parts]
    dense, experts = (sum(n.dense for n in numbers), sum(n.experts for n in numbers))
    return 2 * case.reduce * (dense / axes["fsdp"][0] + experts / axes["efsdp"][0])


def _streams(case: Case, load: Load) -> tuple[float, float, float]:
    """Whole bytes of tp, cp and ep for one micro-batch, all passes: a forward, a backward, and one more of
    what is recomputed in full."""
    again = 1.0 / case.config.recompute_every if case.config.recompute == "full" else 0.0
    parts = [(case.trace.kinds[k], (2.0 + again) * case.micro_batch) for k in load.kinds]
    parts += [(part, 2.0 * case.micro_batch) for part in load.traced_ends(case.trace)]
    tp, cp = (sum(times * kept.sent[axis] for kept, times in parts) for axis in ("tp", "cp"))
    return tp, cp, sum(times * _travel(case, kept) for kept, times in parts)


def _travel(case: Case, kept: Kept) -> float:
    """Bytes of one layer's tokens to the ranks of their experts and of the sums back, one pass.

    A token goes once to each rank that holds experts of it; with balanced choices of K among E experts that
    is ep (1 - C(E - E/ep, K) / C(E, K)) ranks.
    """
    rows, ep = kept.sent["rows"], case.layout.ep
    if not rows or ep == 1:
        return 0.0
    slots, experts = kept.slots, case.profile.num_experts
    none = comb(experts - experts // ep, slots) / comb(experts, slots)
    return 2 * rows / slots * ep * (1 - none)


def _boundaries(case: Case, load: Load) -> float:
    """Bytes to and from neighbouring stages for one micro-batch, forward and backward."""
    if case.layout.pp == 1 or not load.kinds:
        return 0.0
    stream = case.trace.kinds[load.kinds[0]].inputs * case.micro_batch
    borders = 2 * len(load.stages) - int(load.first) - int(load.last)
    return stream * borders
