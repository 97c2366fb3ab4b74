"""Phases: from some point of the data on a run has other shares of sources, rows, batches or rates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from forge_data._renamed import renamed
from forge_data._shared.fields import field
from forge_data._shared.problems import Problem, raise_problems
from forge_data.kinds import integer_problem, is_weight

if TYPE_CHECKING:
    from forge_data.config import DataConfig

__all__ = ["PhaseConfig", "PhaseSegment", "phase_segments"]

_LARGEST = 1 << 60  # above it sums in int64 could overflow
# the limit of data.seq_len, too; not imported, as config imports this module
_MAX_SEQ_LEN = 1 << 24
_MAX_GLOBAL_BATCH = 1 << 20


@dataclass(frozen=True)
class PhaseConfig:
    """What changes from some row of the data on. Raises ValueError with one line per broken rule.

    Usage: `PhaseConfig(start_tokens=9 * 10**9, weights={"books": 1.0}, lr_multiplier=0.1)`.
    """

    start_tokens: int | None = None
    """tokens of the run before it, rounded up to whole rows; or give start_instance"""
    weights: dict[str, float] = field(dict)
    """source = its weight; one that is not named gives nothing (default: as before)"""
    lr_multiplier: float = 1.0
    """factor of the learning rate, in place of that of the phase before"""
    seq_len: int | None = None
    """tokens in a row (default: as before); another length is a new order, and a new epoch of each source"""
    global_batch: int | None = None
    """rows of a step (default: as before); the schedule of the rate then counts tokens"""
    start_instance: int | None = None
    """rows of the run before it"""

    def __post_init__(self) -> None:
        raise_problems("phase", _own_problems(self))


class PhaseSegment(NamedTuple):
    """Rows between two points at which something changes.

    name            of the phase, "" before the first
    start           its first instance
    tokens          of the rows before it
    weights         of the sources by name, None for those of the sources themselves
    global_batch    None for that of the run
    """

    name: str
    start: int
    tokens: int
    seq_len: int
    weights: Mapping[str, float] | None
    lr_multiplier: float
    global_batch: int | None


def phase_segments(config: DataConfig) -> list[PhaseSegment]:
    """The run's data from the start on, in order, one for each phase and one before them."""
    found = [PhaseSegment("", 0, 0, config.seq_len, None, 1.0, None)]
    for name, phase in sorted(config.phases.items(), key=lambda item: _place(item[1])):
        before = found[-1]
        if phase.start_instance is None:
            missing = max(0, _place(phase) - before.tokens)
            start = before.start + -(-missing // before.seq_len)
        else:
            start = phase.start_instance

        found.append(
            PhaseSegment(
                name,
                start,
                before.tokens + (start - before.start) * before.seq_len,
                phase.seq_len or before.seq_len,
                phase.weights or before.weights,
                phase.lr_multiplier,
                phase.global_batch or before.global_batch,
            )
        )
    return found


def _place(phase: PhaseConfig) -> int:
    place = phase.start_tokens if phase.start_instance is None else phase.start_instance
    assert place is not None  # PhaseConfig raises unless one of the two is given
    return place


def _own_problems(c: PhaseConfig) -> Iterator[Problem]:
    starts = {"start_tokens": c.start_tokens, "start_instance": c.start_instance}
    given = {name: value for name, value in starts.items() if value is not None}
    if len(given) != 1:
        rule = f"or start_instance must be given, one of them, and {len(given)} are"
        yield Problem("start_tokens", "one_of", ..., rule, "give the tokens before it")
    for name, value in given.items():
        yield from integer_problem(name, value, 1, _LARGEST, "give what is before it")

    for name, most in (("seq_len", _MAX_SEQ_LEN), ("global_batch", _MAX_GLOBAL_BATCH)):
        value = getattr(c, name)
        if value is not None:
            fix = "leave it out to keep the one before"
            yield from integer_problem(name, value, 1, most, fix)
    for name, weight in c.weights.items():
        if not is_weight(weight):
            rule = "must be a finite number of at least 0"
            yield Problem(f"weights.{name}", "range", weight, rule, "use 1.0")
    if c.weights and not any(c.weights.values()):
        fix = "name the sources that continue"
        yield Problem("weights", "zero_weights", c.weights, "must have one above 0", fix)
    if not (is_weight(c.lr_multiplier) and c.lr_multiplier > 0):
        rule = "must be a finite number above 0"
        yield Problem("lr_multiplier", "range", c.lr_multiplier, rule, "use 1.0")


def phase_problems(c: DataConfig) -> Iterator[Problem]:
    """Problems of phases with the sources and with one another."""
    for name, phase in c.phases.items():
        key = f"phases.{name}.weights"
        for source in phase.weights:
            if source not in c.sources:
                rule = f"must be one of the sources, {', '.join(c.sources)}"
                yield Problem(key, "unknown", source, rule, "correct the name")
        if len(c.sources) == 1 and phase.weights:
            rule = "must not be given for the only source"
            yield Problem(key, "only_source", phase.weights, rule, "remove them")

    if len({phase.start_instance is None for phase in c.phases.values()}) == 2:
        rule = "must all have start_tokens, or all start_instance, to have an order"
        yield Problem("phases", "mixed_starts", ..., rule, "use one of them")
        return

    found = phase_segments(c)
    for before, segment in pairwise(found):
        key = f"phases.{segment.name}"
        if segment[3:] == before[3:]:
            fix = "give it weights, lr_multiplier, seq_len or global_batch"
            yield Problem(key, "no_change", ..., "changes nothing", fix)
        if before.name and segment.start == before.start:
            rule = f"and phases.{before.name} begin at the same place, {segment.start}"
            fix = "make them one phase, or move them apart by more than a row"
            yield Problem(key, "same_start", ..., rule, fix)


__getattr__ = partial(renamed, __name__)
