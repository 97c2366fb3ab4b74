"""When the health of nodes and devices is looked at, and what follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from forge_resilience._shared.fields import Checked, field


@dataclass(frozen=True)
class HealthConfig(Checked):
    """Probes of every rank: its device computes a known answer and keeps patterns, its node has space, shared memory,
    a clock like the others', loopback and the shared folder, and all ranks arrive."""

    at_start: bool = True
    """probe at the start of each life, before the first step"""
    every_steps: int = field(0, between=(0, 10**9))
    """steps between further probes; 0: none"""
    action: Literal["stop", "warn"] = "stop"
    """stop: what is broken ends the run with code 71, and its node is left out of the next life; warn: it is an
    event"""
    memory_mib: int | None = field(None, between=(1, 2**20))
    """device memory that is written and read by a probe, in MiB (default: 512 on an accelerator, 1 on a CPU)"""
    timeout_seconds: float = field(60.0, between=(0, 10**6), positive=True)
    """a rank that has not arrived at a probe after so long is named"""
