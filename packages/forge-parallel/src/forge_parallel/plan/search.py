"""Search of layouts for a number of ranks: allowed ones, the fastest that fit first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

from forge_parallel._shared.problems import invalid
from forge_parallel.config import ParallelConfig
from forge_parallel.plan.candidate import SearchSpace, describe
from forge_parallel.plan.report import Estimate
from forge_parallel.plan.time import SELECTIVE_BUDGET

#: Factor on the score of a layout for each axis above 1. An axis must gain 3 %, which pays for its groups and its ways
#: to fail; a pipeline a sixth, as no published sweep measures one.
AXIS_FACTORS = {"dp_replicate": 0.97, "tp": 0.97, "cp": 0.97, "ep": 0.97, "pp": 0.85}
#: Least tokens of a sequence on a rank of cp that the search tries. A judgment, not measured.
MIN_CP_TOKENS = 4096


def score(estimate: Estimate) -> float:
    """Tokens per second, times the factor of each axis above 1."""
    sizes = estimate.candidate.layout._asdict()
    factor = prod(factor for axis, factor in AXIS_FACTORS.items() if sizes[axis] > 1)
    return estimate.time.tokens_per_second * factor


def search(space: SearchSpace) -> list[Estimate]:
    """Return estimates of all allowed candidates: those that fit by score, then the others by peak memory.

    Cost: about 1 ms for each of some thousand candidates, and one trace per (tp, cp, sequence_parallel).
    """
    found: dict[Any, Estimate] = {}
    for config, micro_batch in product(_layouts(space), space.micro_batches):
        try:
            candidate = space.candidate(config, micro_batch)
        except ValueError:  # a rule is broken
            continue
        found[config, candidate.micro_batch] = Estimate(candidate)
    return sorted(found.values(), key=lambda c: (not c.fits, -score(c) if c.fits else c.peak))


def auto_layout(space: SearchSpace) -> tuple[Estimate, list[str]]:
    """Return the best estimate and the reasons as lines. Raises ValueError if no candidate is allowed, or none fits."""
    ranked = search(space)
    if not ranked:
        rule = f"on {space.world_size} ranks must have an allowed layout, and none is"
        fix = "use a seq_len that tp and cp divide, or fewer ranks"
        raise invalid("global_batch", "layout", space.global_batch, rule, fix)
    best = ranked[0]
    if not best.fits:
        rule = (
            f"x {space.hardware.name} must hold {space.profile.numel / 1e9:.1f} B parameters in "
            f"{space.hardware.limit / 1e9:.0f} GB a rank, and the smallest layout ({describe(best.candidate)}) needs "
            f"{best.peak / 1e9:.0f}"
        )
        fix = "use more ranks, shorter sequences or recompute = 'full'"
        raise invalid("world_size", "memory", space.world_size, rule, fix)
    return best, _reasons(best, ranked)


def _reasons(best: Estimate, ranked: Sequence[Estimate]) -> list[str]:
    """Lines that compare the best layout with data parallelism and with less recomputation."""
    candidate, t, d = best.candidate, best.time, best.candidate.layout
    lines = [
        f"{describe(candidate)}: the best of {sum(c.fits for c in ranked)} layouts that fit, of {len(ranked)} "
        f"that are allowed; {t.step:.2f} s a step, {best.peak / 1e9:.0f} of "
        f"{candidate.hardware.memory / 1e9:.0f} GB"
    ]
    layouts = [(c, c.candidate.layout) for c in ranked]
    plain = [c for c, layout in layouts if layout.tp * layout.pp * layout.cp == 1]
    if d.tp * d.pp * d.cp > 1 and plain:
        verdict = f"need {plain[0].peak / 1e9:.0f} GB"
        if plain[0].fits:
            fast = max(c.time.tokens_per_second for c in plain if c.fits)
            verdict = f"have {fast / t.tokens_per_second:.0%} of its speed"
        lines.append(f"data parallelism without tp, cp and pp would {verdict}")

    waits = [f"{k} {v / t.step:.0%}" for k, v in t.exposed.items() if v > 0.01 * t.step]
    if waits:
        lines.append("waits for " + ", ".join(waits))
    without = [c for c, layout in layouts if layout == d and c.candidate.config.recompute == "none"]
    mode = candidate.config.recompute
    if mode != "none" and without and not without[0].fits:
        least = without[0].peak / 1e9
        lines.append(f"recompute {mode}: without it {least:.0f} GB would be needed")
    return lines


def _layouts(space: SearchSpace) -> Iterator[ParallelConfig]:
    """Yield configurations of all sizes of axes; `SearchSpace.candidate` checks most rules."""
    world, node, p, config = space.world_size, space.gpus_per_node, space.profile, space.config
    # tp and ep communicate in every layer, so they stay inside a node unless the user allows more
    inside = world if config.across_nodes else min(node, world)
    tps = [n for n in _powers(inside) if not p.tp_problems(n)]
    eps = [n for n in _powers(inside) if p.num_experts and p.num_experts % n == 0] or [1]
    cps = [n for n in _powers(world) if n == 1 or p.seq_len // n >= MIN_CP_TOKENS]
    pps = [n for n in range(1, len(p.order) + 1) if world % n == 0 and not p.pp_problems]
    # a replica has at least one full node, whose ranks shard it over NVLink
    replicas = [n for n in _powers(max(1, world // node)) if world % n == 0]
    schedules = list(dict.fromkeys((config.pp_schedule, "1f1b", "interleaved_1f1b")))

    for tp, cp, pp, replicate, ep in product(tps, cps, pps or [1], replicas, eps):
        shard, rest = divmod(world, tp * cp * pp * replicate)
        if rest:
            continue
        sizes: Any = dict(
            dp_replicate=replicate, dp_shard=shard, tp=tp, cp=cp, pp=pp, ep=ep, layout="manual"
        )
        for schedule, mode in product(schedules if pp > 1 else schedules[:1], space.modes):
            sizes |= dict(pp_schedule=schedule, recompute=mode, memory_budget=None)
            if mode == config.recompute:
                sizes["memory_budget"] = config.memory_budget
            # with compile a memory_budget takes its place
            if config.compile and mode == "selective":
                sizes |= dict(recompute="none", memory_budget=SELECTIVE_BUDGET)
            try:
                yield replace(config, **sizes)
            except ValueError:  # options that do not go with these axes
                continue


def _powers(limit: int) -> list[int]:
    """Powers of 2 up to `limit`."""
    return [2**i for i in range(limit.bit_length()) if 2**i <= limit]
