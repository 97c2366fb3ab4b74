"""Probes of devices, nodes and ranks: before training, between restarts, every so many steps.

Importing this costs no torch.
"""

from forge_resilience.health.check import MOST_FINDINGS, HealthCheck, RankFinding
from forge_resilience.health.config import HealthConfig
from forge_resilience.health.device import known_answer, memory_patterns
from forge_resilience.health.exclude import broken_nodes, exclude_nodes
from forge_resilience.health.finding import BROKEN, MISSING, OK, WARN, Finding
from forge_resilience.health.liveness import arrived
from forge_resilience.health.machine import accelerator_count, machine_findings, optional, probe
from forge_resilience.health.node import disk, loopback, shared_memory
from forge_resilience.health.nvml import NvmlProbe

__all__ = [
    "BROKEN",
    "MISSING",
    "MOST_FINDINGS",
    "OK",
    "WARN",
    "Finding",
    "HealthCheck",
    "HealthConfig",
    "NvmlProbe",
    "RankFinding",
    "accelerator_count",
    "arrived",
    "broken_nodes",
    "disk",
    "exclude_nodes",
    "known_answer",
    "loopback",
    "machine_findings",
    "memory_patterns",
    "optional",
    "probe",
    "shared_memory",
]
