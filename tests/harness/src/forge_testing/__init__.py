"""Tiny jobs in real processes, and ways to hurt them."""

from forge_testing.jobs import TINY_JOB, write_job
from forge_testing.processes import Outcome, forge_train, kill_after_step, start, wait_for_step

__all__ = [
    "TINY_JOB",
    "Outcome",
    "forge_train",
    "kill_after_step",
    "start",
    "wait_for_step",
    "write_job",
]
