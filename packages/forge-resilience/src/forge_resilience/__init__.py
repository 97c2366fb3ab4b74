"""Agreed decisions, stop signals, exit codes, an event journal and local ranks of training jobs."""

import sys

from forge_resilience._renamed import OldModules
from forge_resilience.agreement import Agreement, Decision, PendingDecision, Vote
from forge_resilience.exit_codes import ExitCode
from forge_resilience.journal import Journal, read_events
from forge_resilience.local_workers import run_local_workers
from forge_resilience.policy import NumericsPolicy, nonfinite
from forge_resilience.stop import StopSignal

__all__ = [
    "Agreement",
    "Decision",
    "ExitCode",
    "Journal",
    "NumericsPolicy",
    "PendingDecision",
    "StopSignal",
    "Vote",
    "nonfinite",
    "read_events",
    "run_local_workers",
]

# first: an upgrade in place leaves folders with __pycache__ only, which are packages without content
sys.meta_path.insert(0, OldModules)
