"""Modules and names of 0.1, found until 0.3.0 with a DeprecationWarning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forge_resilience._shared.renamed import OldModules, read_renamed

#: Module of 0.1 -> module of today, below the package and in full.
_MODULES = {
    "background_sink": "recorder",
    "chaos.files": "chaos.faults",
    "chaos.processes": "chaos.faults",
    "chaos.strike": "chaos.trial",
    "health.config": "health.check",
    "health.device": "health.probes",
    "health.exclude": "health.check",
    "health.finding": "health.probes",
    "health.liveness": "health.check",
    "health.node": "health.probes",
    "nonfinite": "policy",
    "slurm.commands": "slurm.client",
    "slurm.queue": "slurm.client",
    "slurm.quote": "slurm.script",
    "slurm.shared": "slurm.site",
    "slurm.small_job": "slurm.job_scripts",
    "supervise.config": "supervise.watch",
    "supervise.lives": "supervise.supervisor",
    "supervise.place": "supervise.node_slot",
    "supervise.process_tree": "procfs",
    "supervise.report": "supervise.hang",
    "supervise.stacks": "supervise.hang",
}
MODULES = {f"forge_resilience.{old}": f"forge_resilience.{new}" for old, new in _MODULES.items()}
#: Module -> {name of 0.1: name of today, there or in another module}.
NAMES = {
    "forge_resilience.chaos": {"Striker": "Injector", "Struck": "Injection"},  # language: old names
    "forge_resilience.chaos.trial": {
        "Striker": "Injector",
        "Struck": "Injection",  # language: old name
    },  # language: old names
    "forge_resilience.goodput": {
        "Ledger": "GoodputTable",
        "Span": "Interval",
        "read_ledger": "read_goodput_table",
    },
    "forge_resilience.heartbeat": {"Beat": "HeartbeatRecord"},
    "forge_resilience.health": {"exclude_nodes": "forge_resilience.slurm.client:exclude_nodes"},
    "forge_resilience.health.check": {
        "exclude_nodes": "forge_resilience.slurm.client:exclude_nodes"
    },
    "forge_resilience.local_workers": {"Outcome": "ExitStatus"},
    "forge_resilience.policy": {"Outcome": "StepVerdict"},
    "forge_resilience.supervise.node_slot": {"Place": "NodeSlot", "find_place": "find_node_slot"},
}
OLD_MODULES = OldModules(MODULES)


def renamed(owner: str, level: int = 2) -> Callable[[str], Any]:
    """Return a module's `__getattr__` that reads its old names, with a DeprecationWarning."""
    return read_renamed(NAMES, owner, level)
