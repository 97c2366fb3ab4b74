"""When the health of nodes and devices is looked at, and what follows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any, Literal

from forge_resilience._shared.problems import Problem, raise_problems


def _field(default: Any, help: str) -> Any:
    return dataclass_field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class HealthConfig:
    """Probes of every rank: its device computes a known answer and keeps patterns, its node has space, shared memory,
    a clock like the others', loopback and the shared folder, and all ranks arrive."""

    at_start: bool = _field(True, "probe at the start of each life, before the first step")
    every_steps: int = _field(0, "steps between further probes; 0: none")
    action: Literal["stop", "warn"] = _field(
        "stop",
        "stop: what is broken ends the run with code 71, and its node is left out of the next life; warn: it is an event",
    )
    memory_mib: int | None = _field(
        None,
        "device memory that is written and read by a probe, in MiB (default: 512 on an accelerator, 1 on a CPU)",
    )
    timeout_seconds: float = _field(
        60.0, "a rank that has not arrived at a probe after so long is named"
    )

    def __post_init__(self) -> None:
        raise_problems("", self._problems())

    def _problems(self) -> Iterator[Problem]:
        if not 0 <= self.every_steps <= 10**9:
            fix = "use 1000, or 0 for none"
            yield Problem("every_steps", "range", self.every_steps, "must be from 0 to 10**9", fix)
        if self.memory_mib is not None and not 1 <= self.memory_mib <= 2**20:
            rule, fix = f"must be from 1 to {2**20}", "use 512, or leave it out"
            yield Problem("memory_mib", "range", self.memory_mib, rule, fix)
        if not 0 < self.timeout_seconds <= 10**6:
            rule = "must be above 0 and at most 10**6"
            yield Problem("timeout_seconds", "range", self.timeout_seconds, rule, "use 60")
