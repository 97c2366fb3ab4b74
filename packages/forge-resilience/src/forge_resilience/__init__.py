"""Agreed decisions, stop signals, exit codes, an event journal, a supervisor and Slurm scripts for training jobs.

Modules, and names of modules that a training process need not import, are imported when they are first used.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from forge_resilience._renamed import OLD_MODULES
from forge_resilience.agreement import Agreement, Decision, PendingDecision, Vote
from forge_resilience.exit_codes import ExitCode
from forge_resilience.journal import Journal, read_events
from forge_resilience.local_workers import run_local_workers
from forge_resilience.policy import NumericsPolicy, nonfinite
from forge_resilience.stop import StopSignal

if TYPE_CHECKING:
    from forge_resilience import (  # fmt: skip
        alerts,
        chaos,
        goodput,
        health,
        heartbeat,
        policy,
        replicas,
        sinks,
        slurm,
        supervise,
    )
    from forge_resilience.heartbeat import Heartbeat
    from forge_resilience.replicas import ReplicaCheck
    from forge_resilience.supervise.supervisor import Result
    from forge_resilience.supervise.watch import WatchConfig

__all__ = [
    "Agreement", "Decision", "ExitCode", "Heartbeat", "Journal", "NumericsPolicy", "PendingDecision", "ReplicaCheck",
    "Result", "StopSignal", "Vote", "WatchConfig", "alerts", "chaos", "goodput", "health", "heartbeat", "nonfinite",
    "policy", "read_events", "replicas", "run_local_workers", "sinks", "slurm", "supervise",
]  # fmt: skip
#: Name -> the module that has it, imported when the name is first used, so that the package imports none of them.
_LATE = {
    "Heartbeat": "heartbeat",
    "ReplicaCheck": "replicas",
    "Result": "supervise.supervisor",
    "WatchConfig": "supervise.watch",
}

# first: an upgrade in place leaves folders with __pycache__ only, which are packages without content
sys.meta_path.insert(0, OLD_MODULES)


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(importlib.import_module(f"{__name__}.{_LATE[name]}"), name)
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
