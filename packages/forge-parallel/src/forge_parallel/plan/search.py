"""Layouts for a number of ranks: those that are allowed and fit, the fastest first."""

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

#: Factor on the score for each axis above 1: it must gain 3 % to be worth its groups and its ways to fail; a
#: pipeline, which no published sweep measures, a sixth.
WORTH = {"dp_replicate": 0.97, "tp": 0.97, "cp": 0.97, "ep": 0.97, "pp": 0.85}
#: memory_budget with which compiled blocks save about as much as selective recomputation does.
BUDGET = 0.7


def score(estimate: Estimate) -> float:
    """Tokens per second, less for each axis."""
    sizes = estimate.candidate.layout._asdict()
    worth = prod(share for axis, share in WORTH.items() if sizes[axis] > 1)
    return estimate.time.tokens_per_second * worth


def search(space: SearchSpace) -> list[Estimate]:
    """Estimates of all allowed candidates of some thousands: those that fit by score, then the others by peak.

    Cost: about 1 ms each, and one trace per (tp, cp, sequence_parallel).
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
    """The best estimate, and the reasons in words. ValueError if no candidate is allowed, or none fits."""
    ranked = search(space)
    if not ranked:
        rule = f"on {space.world_size} ranks must have an allowed layout, and none is"
        fix = "use rows of a length that tp and cp divide, or fewer layers than ranks of pp"
        raise invalid("global_batch", "layout", space.global_batch, rule, fix)
    best = ranked[0]
    if not best.fits:
        rule = (
            f"x {space.hardware.name} must hold {space.profile.numel / 1e9:.1f} B parameters in "
            f"{space.hardware.limit / 1e9:.0f} GB a rank, and the smallest layout ({describe(best.candidate)}) needs "
            f"{best.peak / 1e9:.0f}"
        )
        fix = "use more ranks, shorter rows or recompute = 'full'"
        raise invalid("world_size", "memory", space.world_size, rule, fix)
    return best, _reasons(best, ranked)


def _reasons(best: Estimate, ranked: Sequence[Estimate]) -> list[str]:
    candidate, t, d = best.candidate, best.time, best.candidate.layout
    lines = [
        f"{describe(candidate)}: the best of {sum(c.fits for c in ranked)} layouts that fit, of {len(ranked)} "
        f"that are allowed; {t.step:.2f} s a step, {best.peak / 1e9:.0f} of "
        f"{candidate.hardware.memory / 1e9:.0f} GB"
    ]
    plain = [
        c
        for c in ranked
        if c.candidate.layout.tp * c.candidate.layout.pp * c.candidate.layout.cp == 1
    ]
    if d.tp * d.pp * d.cp > 1 and plain:
        alone = f"need {plain[0].peak / 1e9:.0f} GB"
        if plain[0].fits:
            fast = max(c.time.tokens_per_second for c in plain if c.fits)
            alone = f"have {fast / t.tokens_per_second:.0%} of its speed"
        lines.append(f"data parallelism alone would {alone}")
    waits = [f"{k} {v / t.step:.0%}" for k, v in t.exposed.items() if v > 0.01 * t.step]
    if waits:
        lines.append("waits for " + ", ".join(waits))
    without = [
        c for c in ranked if c.candidate.layout == d and c.candidate.config.recompute == "none"
    ]
    mode = candidate.config.recompute
    if mode != "none" and without and not without[0].fits:
        least = without[0].peak / 1e9
        lines.append(f"recompute {mode}: without it {least:.0f} GB would be needed")
    return lines


def _layouts(space: SearchSpace) -> Iterator[ParallelConfig]:
    """Configurations of all sizes of axes; most rules are left to `SearchSpace.candidate`."""
    world, node, p, config = space.world_size, space.gpus_per_node, space.profile, space.config
    inside = world if config.across_nodes else min(node, world)
    tps = [n for n in _powers(inside) if not p.tp_problems(n)]
    eps = [n for n in _powers(inside) if p.num_experts and p.num_experts % n == 0] or [1]
    cps = [n for n in _powers(world) if n == 1 or p.seq_len // n >= 4096]
    pps = [n for n in range(1, len(p.order) + 1) if world % n == 0 and not p.pp_problems]
    copies = [n for n in _powers(max(1, world // node)) if world % n == 0]
    schedules = list(dict.fromkeys((config.pp_schedule, "1f1b", "interleaved_1f1b")))
    for tp, cp, pp, replicate, ep in product(tps, cps, pps or [1], copies, eps):
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
                sizes |= dict(recompute="none", memory_budget=BUDGET)
            try:
                yield replace(config, **sizes)
            except ValueError:  # options that do not go with these axes
                continue


def _powers(limit: int) -> list[int]:
    return [2**i for i in range(limit.bit_length()) if 2**i <= limit]
