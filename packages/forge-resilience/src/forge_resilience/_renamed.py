"""Modules and names of 0.1, found until 0.3.0 with a DeprecationWarning."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

#: Module of 0.1 -> module of today.
MODULES = {
    f"forge_resilience.{old}": f"forge_resilience.{new}"
    for old, new in {
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
    }.items()
}
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


class OldModules:
    """Import finder and loader: a module path of 0.1 is the module of today, with a DeprecationWarning."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, OldModules) if name in MODULES else None  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: ModuleSpec) -> None:
        return None

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        new = MODULES[module.__name__]
        warnings.warn(f"{module.__name__} is {new} now", DeprecationWarning, stacklevel=2)
        # the import system returns what is here afterwards
        sys.modules[module.__name__] = importlib.import_module(new)


def renamed(owner: str) -> Callable[[str], Any]:
    """Return a module's `__getattr__` that reads its old names, with a DeprecationWarning."""

    def read(name: str) -> Any:
        new = NAMES[owner].get(name)
        if new is None:
            raise AttributeError(f"module {owner!r} has no attribute {name!r}")
        module, _, attribute = f"{owner}:{new}".rpartition(":")
        module = module.rpartition(":")[2]
        text = f"{owner}.{name} is {module}.{attribute} now"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(module), attribute)

    return read
