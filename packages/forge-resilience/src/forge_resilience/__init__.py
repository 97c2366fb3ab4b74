"""Stop signals, exit codes and an event journal for training jobs."""

from forge_resilience.exit_codes import ExitCode
from forge_resilience.journal import Journal, read_events
from forge_resilience.stop import StopSignal

__all__ = ["ExitCode", "Journal", "StopSignal", "read_events"]
