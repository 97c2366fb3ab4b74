"""How long ranks may stay in a phase, and what follows when one stays longer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal

from forge_resilience._shared.fields import Checked, field
from forge_resilience._shared.problems import Problem

__all__ = ["WatchConfig"]


@dataclass(frozen=True)
class WatchConfig(Checked):
    """Limits of the phases of a rank, in seconds; 0 means none. Raises ValueError with every broken rule.

    Usage: `WatchConfig("restart", step_seconds=120, limits={"save": 900})`.
    """

    action: Literal["off", "report", "restart"] = field(
        "report",
        "of the process that starts the ranks when one is late: restart kills them and starts them again, as it does "
        "after a crash; report prints where each rank is, and leaves them alone",
    )
    step_seconds: float = field(900.0, "limit of a step, and of the wait for its data; 0: none")
    first_step_seconds: float = field(
        3600.0, "the same for the first step of a process, which may compile for long"
    )
    start_seconds: float = field(
        3600.0, "limit of the start, imports included, and of loading a checkpoint"
    )
    other_seconds: float = field(
        7200.0, "limit of any other phase: evaluate, save, exit, and a save in the background"
    )
    limits: dict[str, float] = field(dict, "limits of single phases, by name: {save = 900}")
    max_restarts: int = field(
        10,
        "restarts of one start of the command; two in a row without progress end it with 70",
        (0, 10**6),
    )

    def _problems(self) -> Iterator[Problem]:
        names = ("step_seconds", "first_step_seconds", "start_seconds", "other_seconds")
        seconds = {name: getattr(self, name) for name in names}
        seconds |= {f"limits.{phase}": value for phase, value in self.limits.items()}
        if not all(self.limits):
            rule, fix = "must be names of phases", "use save=900"
            yield Problem("limits", "format", sorted(self.limits), rule, fix)
        for name, value in seconds.items():
            if value and not 0.1 <= value <= 10**7:
                rule = "must be from 0.1 to 10**7 seconds, or 0 for no limit"
                yield Problem(name, "range", value, rule, "use 900")
        if self.action not in ("off", "report", "restart"):
            rule = "must be off, report or restart"
            yield Problem("action", "unknown", self.action, rule, "use restart")

    def limit(self, phase: str, first_step: bool = False) -> float:
        """Seconds that a rank may stay in `phase`; infinity without a limit."""
        seconds = self.limits.get(phase)
        if seconds is None:
            if phase in ("start", "load"):
                seconds = self.start_seconds
            elif phase in ("data", "step"):
                seconds = self.first_step_seconds if first_step else self.step_seconds
            else:
                seconds = self.other_seconds
        return seconds or float("inf")

    def command(self, journal: str = "", python: str = sys.executable) -> tuple[str, ...]:
        """The command of a supervisor with these limits, which `--nproc N -- COMMAND` follows, of ranks with heartbeats."""
        limits = ",".join(f"{phase}={seconds}" for phase, seconds in self.limits.items())
        values = asdict(self) | {"limits": limits, "journal": journal}
        flags = [f"--{name}={value}" for name, value in values.items() if value != ""]
        return (python, "-m", "forge_resilience.supervise", *flags, "--expect_heartbeats")

    @property
    def shortest(self) -> float:
        """The shortest limit, infinity without any."""
        phases = ("start", "step", "other", *self.limits)
        return min(min(self.limit(phase), self.limit(phase, True)) for phase in phases)
