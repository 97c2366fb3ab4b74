"""Seeded faults for any training command: what strikes, when, and whether it struck there. No torch."""

from forge_resilience.chaos.faults import FILE_KINDS, PROCESS_KINDS, ProcessKind, damage
from forge_resilience.chaos.schedule import BETWEEN, FIRST, Fault, failure_rate_bound, make_schedule
from forge_resilience.chaos.trial import (
    ASYNC_SAVE,
    CommandLife,
    Life,
    Result,
    Striker,
    Struck,
    Trial,
)  # fmt: skip

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
