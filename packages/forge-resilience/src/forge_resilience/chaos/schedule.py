"""The schedule of faults: a list that a seed determines, with every kind in every phase that applies."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forge_resilience._shared.problems import invalid
from forge_resilience.goodput import solve_falling

FIRST = ("start", "load")
"""Phases that come once in an attempt, at its beginning."""
ONCE = (*FIRST, "exit")
BETWEEN = "between"
"""Phase of a fault that needs no running process: files, between two attempts."""


@dataclass(frozen=True)
class Fault:
    """One planned fault.

    phase: the phase of the heartbeat in which it is injected, `async_save` for the background's save, BETWEEN for none.
    entry: it is injected when the rank enters the phase for the entry-th time in the attempt, from 1.
    fraction: how far into the phase, 0 to 1 of the time that the phase took before.
    seed: of what else is drawn (which file, which bit).
    """

    number: int
    kind: str
    phase: str
    rank: int
    entry: int
    fraction: float
    seed: int


def make_schedule(
    seed: int, count: int, kinds: Mapping[str, Sequence[str]], ranks: int, max_entry: int = 4
) -> list[Fault]:
    """Return `count` faults of `kinds` (kind -> phases that apply); the same arguments give the same list.

    All pairs of kind and phase come in a random order, then all again in another one, so any prefix is spread
    evenly. Raises ValueError without kinds, or for a kind without phases.
    """
    pairs = [(kind, phase) for kind, phases in kinds.items() for phase in phases]
    empty = [kind for kind, phases in kinds.items() if not phases]
    if not pairs or empty:
        raise invalid("kinds", "missing", empty, "must each have a phase", "name some")

    draw, faults = random.Random(seed), list[Fault]()
    while len(faults) < count:
        for kind, phase in draw.sample(pairs, len(pairs)):
            fault = Fault(
                number=len(faults),
                kind=kind,
                phase=phase,
                rank=draw.randrange(ranks),
                entry=1 if phase in ONCE else draw.randint(1, max_entry),
                fraction=draw.random(),
                seed=draw.getrandbits(32),
            )
            faults.append(fault)
    return faults[:count]


def failure_rate_bound(failures: int, faults: int, confidence: float = 0.95) -> float:
    """Return the upper bound of the failure rate after `failures` of `faults`; exact for independent faults.

    Without a failure it is 1 - (1 - confidence)^(1/n), just below 3 / n: the rule of three. 1.0 without faults.
    """
    if not 0 <= failures <= faults:
        raise invalid("failures", "range", failures, f"must be from 0 to {faults} faults")
    if failures == faults:
        return 1.0
    ways = [math.comb(faults, k) for k in range(failures + 1)]

    def at_most_so_many(rate: float) -> float:
        logs = (k * math.log(rate) + (faults - k) * math.log1p(-rate) for k in range(len(ways)))
        return sum(math.exp(math.log(n) + log) for n, log in zip(ways, logs))

    return solve_falling(at_most_so_many, 1 - confidence, 1.0)
