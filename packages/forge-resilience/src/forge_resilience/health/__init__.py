"""Probes of devices, nodes and ranks: before training, between restarts, every so many steps.

Importing this costs no torch.
"""

from forge_resilience._renamed import renamed
from forge_resilience.health.check import (
    MOST_FINDINGS,
    HealthCheck,
    HealthConfig,
    RankFinding,
    arrived,
    broken_nodes,
)  # fmt: skip
from forge_resilience.health.machine import accelerator_count, machine_findings, optional, probe
from forge_resilience.health.nvml import NvmlProbe
from forge_resilience.health.probes import (
    BROKEN,
    MISSING,
    OK,
    WARN,
    Finding,
    disk,
    known_answer,
    loopback,
    memory_patterns,
    shared_memory,
)  # fmt: skip

__all__ = [
    "BROKEN", "MISSING", "MOST_FINDINGS", "OK", "WARN", "Finding", "HealthCheck", "HealthConfig", "NvmlProbe", "RankFinding",
    "accelerator_count", "arrived", "broken_nodes", "disk", "known_answer", "loopback", "machine_findings",
    "memory_patterns", "optional", "probe", "shared_memory",
]  # fmt: skip

__getattr__ = renamed(__name__)
