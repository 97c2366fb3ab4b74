"""The configuration of windows of torch.profiler by step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from forge_parallel._shared.fields import Checked
from forge_parallel._shared.problems import Problem
from forge_parallel.profile.window import window_problems

__all__ = ["ProfileConfig"]


@dataclass(frozen=True)
class ProfileConfig(Checked):
    """A window of steps under torch.profiler, off by default: a trace and a table in <run.dir>/profile."""

    start_step: int = 10
    """first step of the window; the profiler warms up in the one before"""
    num_steps: int = 0
    """steps of the window; 0: no profile"""
    every_steps: int = 0
    """steps from the beginning of a window to the next; 0: one window"""
    ranks: tuple[int, ...] = (0,)
    """ranks that profile; each writes files of its own"""
    memory: bool = False
    """record allocations, too: bytes by category in the table, and on CUDA a snapshot with stacks"""

    def _problems(self) -> Iterator[Any]:
        yield from window_problems(self.start_step, self.num_steps, self.every_steps)
        if not self.ranks or any(rank < 0 for rank in self.ranks):
            rule = "must hold numbers of ranks"
            yield Problem("ranks", "range", list(self.ranks), rule, "use [0]")

    def run_problems(self, world_size: int, total_steps: int) -> Iterator[Any]:
        """Why a run of so many ranks and steps never comes to this window."""
        last = self.start_step + self.num_steps - 1
        if last > total_steps:
            rule = (
                f"begins the window of steps {self.start_step} to {last}, which must be within the run of {total_steps} "
                "steps"
            )
            fix = "lower start_step or num_steps"
            yield Problem("start_step", "window", self.start_step, rule, fix)
        missing = [rank for rank in self.ranks if rank >= world_size]
        if missing:
            rule = f"must be below the number of ranks, {world_size}"
            yield Problem("ranks", "world", missing, rule, "use [0]")
