"""Layouts for a number of ranks: those that are allowed and fit, the fastest first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import Any, NamedTuple

from forge_parallel.config import ParallelConfig
from forge_parallel.pipeline.schedule import schedule_problems
from forge_parallel.plan.case import Case, Storage
from forge_parallel.plan.memory import stage_memory
from forge_parallel.plan.profile import Profile
from forge_parallel.plan.time import Time, step_time
from forge_parallel.plan.topology import Hardware

#: What an axis more must bring to be worth its groups, its seams and its failures; a pipeline, which no
#: published sweep measures, a sixth.
WORTH = {"dp_replicate": 0.97, "tp": 0.97, "cp": 0.97, "ep": 0.97, "pp": 0.85}
#: The share of activations with which compiled blocks keep about what selective recomputation does.
BUDGET = 0.7
MODES = ("none", "selective", "full")


class Candidate(NamedTuple):
    """One allowed way, its fullest rank's bytes and its time."""

    case: Case
    peak: float
    time: Time

    @property
    def fits(self) -> bool:
        """Whether the fullest rank stays below the usable part of its memory."""
        return self.peak <= self.case.hardware.memory * self.case.hardware.usable

    @property
    def score(self) -> float:
        """Tokens per second, less for each axis."""
        sizes = self.case.layout._asdict()
        worth = prod(share for axis, share in WORTH.items() if sizes[axis] > 1)
        return self.time.tokens_per_second * worth


@dataclass(frozen=True)
class Wish:
    """What a layout is wanted for. `micro_batches` and `modes` (of recomputation) may be chosen from."""

    profile: Profile
    config: ParallelConfig
    world_size: int
    global_batch: int
    hardware: Hardware
    gpus_per_node: int
    micro_batches: Sequence[int | None] = (None,)
    modes: Sequence[str] = MODES
    storage: Storage = field(default_factory=Storage)

    def case(self, config: ParallelConfig, micro_batch: int | None) -> Case:
        """One way; without a micro_batch a rank's whole share. ValueError where axes do not multiply."""
        rows = self.global_batch // config.axes(self.world_size, self.gpus_per_node).batch_size
        return Case(self.profile, config, self.world_size, self.global_batch,
                    micro_batch or max(rows, 1), self.hardware, self.gpus_per_node, self.storage)  # fmt: skip


def problems(case: Case) -> list[str]:
    """Why a layout cannot run this model and batch, each as value and rule; empty if it can."""
    d, p, c = case.layout, case.profile, case.config
    found = []
    if case.global_batch % d.batch_size:
        found.append(
            f"global_batch {case.global_batch} must be divisible by {d.batch_size} readers"
        )
    elif case.global_batch // d.batch_size % case.micro_batch:
        rows = case.global_batch // d.batch_size
        found.append(f"micro_batch {case.micro_batch} must divide the {rows} rows of a rank")
    if (misfit := p.misfit_tp(d.tp)) is not None:
        found.append(misfit)
    experts = p.num_experts
    if d.ep > 1 and (not experts or experts % d.ep):
        found.append(f"ep {d.ep} must divide the {experts} experts")
    cut = d.tp > 1 and (c.sequence_parallel or experts > 0)
    pieces = (2 * d.cp if d.cp > 1 else 1) * (d.tp if cut else 1)
    if p.seq_len % pieces:
        found.append(f"seq_len {p.seq_len} must be divisible by {pieces} (cp {d.cp}, tp {d.tp})")
    if d.cp > 1 and not p.has_attend:
        found.append(f"cp {d.cp} needs attention with an attribute attend")
    if d.pp > 1:
        found += (
            schedule_problems(c, max(case.num_micro_batches, 0), len(p.order))
            if p.cuttable
            else [f"pp {d.pp} needs a model with pipeline_parts()"]
        )
    return found


def search(wish: Wish) -> list[Candidate]:
    """All allowed ways of some thousands: those that fit by score, then the others by peak.

    Cost: about 1 ms each, and one trace per (tp, cp, sequence_parallel).
    """
    found: dict[Any, Candidate] = {}
    for config, micro_batch in product(_layouts(wish), wish.micro_batches):
        try:
            case = wish.case(config, micro_batch)
        except ValueError:  # axes that do not multiply, or leave their node
            continue
        if not problems(case):
            memory = [stage_memory(case, rank) for rank in range(case.layout.pp)]
            peak = max(m.peak for m in memory)
            found[config, case.micro_batch] = Candidate(case, peak, step_time(case, memory))
    return sorted(found.values(), key=lambda c: (not c.fits, -c.score if c.fits else c.peak))


def choose(wish: Wish) -> tuple[Candidate, list[str]]:
    """The best way and why, in words. ValueError where none is allowed, or none fits."""
    ranked = search(wish)
    if not ranked:
        raise ValueError(
            f"global_batch {wish.global_batch} on {wish.world_size} ranks must have an allowed layout, and "
            f"none is; use a multiple of {wish.world_size}, and rows of a length that tp and cp divide"
        )
    best = ranked[0]
    if not best.fits:
        least, limit = best.peak / 1e9, wish.hardware.memory * wish.hardware.usable / 1e9
        raise ValueError(
            f"{wish.profile.numel / 1e9:.1f} B parameters on {wish.world_size} x {wish.hardware.name} must "
            f"stay below {limit:.0f} GB a rank, and the smallest layout ({describe(best.case)}) needs "
            f"{least:.0f}; use more ranks, shorter rows or recompute = 'full'"
        )
    return best, _reasons(best, ranked)


def describe(case: Case) -> str:
    """`dp_shard 8 x tp 4, micro_batch 2, recompute full`, in words of the configuration."""
    c, sizes = case.config, case.layout._asdict()
    axes = [
        f"{n} {sizes[n]}" for n in ("dp_replicate", "dp_shard", "tp", "cp", "pp") if sizes[n] > 1
    ]
    said = [" x ".join(axes) or "one rank"]
    said += [f"ep {case.layout.ep}"] * (case.layout.ep > 1)
    said += [c.pp_schedule] * (case.layout.pp > 1)
    said += [f"micro_batch {case.micro_batch}", f"recompute {c.recompute}"]
    return ", ".join(said + ([f"memory_budget {c.memory_budget:g}"] if c.memory_budget else []))


def _reasons(best: Candidate, ranked: Sequence[Candidate]) -> list[str]:
    case, t, d = best.case, best.time, best.case.layout
    lines = [
        f"{describe(case)}: the best of {sum(c.fits for c in ranked)} layouts that fit, of {len(ranked)} "
        f"that are allowed; {t.step:.2f} s a step, {best.peak / 1e9:.0f} of "
        f"{case.hardware.memory / 1e9:.0f} GB"
    ]
    plain = [c for c in ranked if c.case.layout.tp * c.case.layout.pp * c.case.layout.cp == 1]
    if d.tp * d.pp * d.cp > 1 and plain:
        fast = max((c.time.tokens_per_second for c in plain if c.fits), default=0.0)
        least = min(c.peak for c in plain) / 1e9
        alone = (
            f"have {fast / t.tokens_per_second:.0%} of its speed"
            if fast
            else f"need {least:.0f} GB"
        )
        lines.append(f"data parallelism alone would {alone}")
    waits = [f"{k} {v / t.step:.0%}" for k, v in t.exposed.items() if v > 0.01 * t.step]
    if waits:
        lines.append("waits for " + ", ".join(waits))
    without = [c for c in ranked if c.case.layout == d and c.case.config.recompute == "none"]
    if case.config.recompute != "none" and without and not any(c.fits for c in without):
        least = min(c.peak for c in without) / 1e9
        lines.append(
            f"recompute {case.config.recompute}: without it {least:.0f} GB would be needed"
        )
    return lines


def _layouts(wish: Wish) -> Iterator[ParallelConfig]:
    """Configurations of all sizes of axes; rules are checked by `problems`."""
    world, node, p, config = wish.world_size, wish.gpus_per_node, wish.profile, wish.config
    inside = world if config.across_nodes else min(node, world)
    tps = [n for n in _powers(inside) if p.misfit_tp(n) is None]
    eps = [n for n in _powers(inside) if p.num_experts and p.num_experts % n == 0] or [1]
    cps = [n for n in _powers(world) if n == 1 or p.seq_len // n >= 4096]
    pps = [n for n in range(1, len(p.order) + 1) if world % n == 0] if p.cuttable else [1]
    copies = [n for n in _powers(max(1, world // node)) if world % n == 0]
    schedules = list(dict.fromkeys((config.pp_schedule, "1f1b", "interleaved_1f1b")))
    for tp, cp, pp, replicate, ep in product(tps, cps, pps or [1], copies, eps):
        shard = world // (tp * cp * pp * replicate)
        if shard * tp * cp * pp * replicate != world or wish.global_batch % (replicate * shard):
            continue
        sizes: Any = {
            "dp_replicate": replicate,
            "dp_shard": shard,
            "tp": tp,
            "cp": cp,
            "pp": pp,
            "ep": ep,
        }
        for schedule, mode in product(schedules if pp > 1 else schedules[:1], wish.modes):
            budget = config.memory_budget if mode == config.recompute else None
            if config.compile and mode == "selective":  # the compiler chooses what that would
                mode, budget = "none", BUDGET
            sizes |= {"pp_schedule": schedule, "recompute": mode, "memory_budget": budget}
            try:
                yield replace(config, layout="manual", **sizes)
            except ValueError:  # options that do not go with these axes
                continue


def _powers(limit: int) -> list[int]:
    return [2**i for i in range(limit.bit_length()) if 2**i <= limit]
