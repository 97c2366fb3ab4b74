"""Probes of devices, nodes and ranks: before training, between restarts, every so many steps.

Importing this costs no torch.
"""

from forge_resilience.health.check import HealthCheck, RankFinding
from forge_resilience.health.config import HealthConfig
from forge_resilience.health.device import known_answer, memory_patterns
from forge_resilience.health.exclude import broken_nodes, exclude_nodes
from forge_resilience.health.finding import BROKEN, MISSING, OK, WARN, Finding
from forge_resilience.health.liveness import arrived
from forge_resilience.health.node import disk, loopback, shared_memory
from forge_resilience.health.nvml import NvmlProbe

__all__ = [
    "BROKEN",
    "MISSING",
    "OK",
    "WARN",
    "Finding",
    "HealthCheck",
    "HealthConfig",
    "NvmlProbe",
    "RankFinding",
    "arrived",
    "broken_nodes",
    "disk",
    "exclude_nodes",
    "known_answer",
    "loopback",
    "memory_patterns",
    "shared_memory",
]
