"""What each axis carries in one step."""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

from forge_parallel.plan.case import Case, Load
from forge_parallel.plan.memory import whole_numel
from forge_parallel.plan.trace import Kept

#: Collectives of a block in a forward and backward, and the least that one takes; twice that between nodes.
CALLS = {"fsdp": 3, "efsdp": 3, "tp": 8, "cp": 4, "ep": 6}
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


def stage_traffic(case: Case, pp_rank: int = 0) -> list[Traffic]:
    """The axes with more than one rank, on a rank of pipeline stage(s) `pp_rank`."""
    load, m = case.load(pp_rank), case.num_micro_batches
    streams = _streams(case, load)
    rows = {
        "fsdp": ("all-gather of weights, reduce-scatter of gradients", _weights(case, load, False)),
        "efsdp": ("the same of experts", _weights(case, load, True)),
        "dp_replicate": ("all-reduce of gradient shards", _copies(case, load)),
        "tp": ("all-gather and reduce-scatter of tokens", streams["tp"] * m),
        "cp": ("keys and values", streams["cp"] * m),
        "ep": ("tokens to their experts and back", streams["ep"] * m),
        "pp": ("activations and their gradients", _boundaries(case, load) * m),
    }
    found, passes = [], m * len(load.kinds)
    calls = {"pp": 4 * m * len(load.stages), "dp_replicate": len(load.kinds)}
    for axis, (what, whole) in rows.items():
        size = case.topology.axes()[axis][0]
        if size == 1 or not whole:
            continue
        crosses = case.topology.crosses(axis)
        seconds = case.topology.seconds(axis, whole, case.hardware)
        seconds += calls.get(axis, CALLS.get(axis, 0) * passes) * LATENCY * (1 + crosses)
        share = 1.0 if axis == "pp" else (size - 1) / size
        found.append(Traffic(axis, what, whole, whole * share, crosses, seconds))
    return found


def forwards_and_backwards(case: Case) -> float:
    """Passes through a block's collectives per micro-batch: two, and one more where all is recomputed."""
    again = case.config.recompute == "full"
    return 2.0 + (1.0 / case.config.recompute_every if again else 0.0)


def _weights(case: Case, load: Load, experts: bool) -> float:
    """Whole bytes of FSDP's gathers and reductions in a step."""
    if not case.wrapped:
        return 0.0
    apart = case.layout.ep * case.layout.tp > 1
    if experts and not apart:
        return 0.0
    which = experts if apart else None
    kinds = sum(whole_numel(case.profile.kinds[k], case, which) for k in load.kinds)
    ends = whole_numel(case.profile.ends(load.first, load.last), case, which)
    m = case.num_micro_batches
    once = case.layout.pp > 1  # torch's stages leave weights gathered and sum gradients at the end
    gathers = (m if case.reshards else 1) if once else m * (2 if case.reshards else 1)
    reduces = 1 if once or case.storage.sync_once else m
    wire = 1 if case.config.float8_all_gather else case.compute
    whole = kinds * (gathers * wire + reduces * case.reduce)
    return whole + ends * ((1 if once else m) * case.compute + reduces * case.reduce)


def _copies(case: Case, load: Load) -> float:
    """An all-reduce is a reduce-scatter and an all-gather, of a shard, once a step."""
    d, held = case.layout, load.parts(case.profile)
    shards = d.dp_shard * d.cp
    lenders = shards * d.tp / d.ep if d.ep * d.tp > 1 else shards
    dense, experts = (sum(whole_numel(p, case, which) for p in held) for which in (False, True))
    return 2 * case.reduce * (dense / shards + experts / lenders)


def _streams(case: Case, load: Load) -> dict[str, float]:
    """Whole bytes of tp, cp and ep for one micro-batch, all passes."""
    found = dict.fromkeys(("tp", "cp", "ep"), 0.0)
    passes = forwards_and_backwards(case)
    parts = [(case.trace.kinds[k], passes) for k in load.kinds]
    parts += [(part, 2.0) for part in load.traced_ends(case.trace)]
    for kept, times in parts:
        for axis in ("tp", "cp"):
            found[axis] += times * case.micro_batch * kept.sent[axis]
        found["ep"] += times * case.micro_batch * _travel(case, kept)
    found["tp"] *= case.storage.gathers
    return found


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
