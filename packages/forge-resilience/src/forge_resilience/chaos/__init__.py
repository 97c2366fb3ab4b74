"""Seeded faults for any training command: what strikes, when, and whether it struck there. No torch."""

from forge_resilience.chaos.files import FILE_KINDS, damage
from forge_resilience.chaos.processes import PROCESS_KINDS, ProcessKind
from forge_resilience.chaos.schedule import BETWEEN, FIRST, Fault, failure_rate_bound, make_schedule
from forge_resilience.chaos.strike import ASYNC_SAVE, Life, Striker, Struck
from forge_resilience.chaos.trial import CommandLife, Result, Trial

__all__ = [
    "ASYNC_SAVE",
    "BETWEEN",
    "FILE_KINDS",
    "FIRST",
    "PROCESS_KINDS",
    "CommandLife",
    "Fault",
    "Life",
    "ProcessKind",
    "Result",
    "Striker",
    "Struck",
    "Trial",
    "damage",
    "failure_rate_bound",
    "make_schedule",
]
