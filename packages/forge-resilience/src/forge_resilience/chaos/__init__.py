"""Seeded faults for any training command: which, when, and whether they hit the planned phase. No torch."""

from forge_resilience._renamed import renamed
from forge_resilience.chaos.faults import FILE_KINDS, PROCESS_KINDS, ProcessKind, damage
from forge_resilience.chaos.schedule import BETWEEN, FIRST, Fault, failure_rate_bound, make_schedule
from forge_resilience.chaos.trial import (
    ASYNC_SAVE,
    CommandLife,
    Injection,
    Injector,
    Life,
    Result,
    Trial,
)  # fmt: skip

__all__ = [
    "ASYNC_SAVE", "BETWEEN", "FILE_KINDS", "FIRST", "PROCESS_KINDS", "CommandLife", "Fault", "Injection", "Injector", "Life",
    "ProcessKind", "Result", "Trial", "damage", "failure_rate_bound", "make_schedule",
]  # fmt: skip

__getattr__ = renamed(__name__)
