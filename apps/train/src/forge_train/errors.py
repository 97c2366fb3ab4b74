"""Errors that a user can cause, each with the exit code that the shell and the scheduler see: `forge_resilience.errors`."""

from forge_resilience.errors import *  # noqa: F403

__all__ = [  # noqa: F405
    "ConfigError", "DataError", "HardwareError", "JobError", "NumericsError", "Report", "StateError",
    "as_config_error", "config_errors", "data_errors", "job_errors", "of_limit", "problems_at", "problems_under",
    "raise_reported", "received", "refuse", "report_of", "run_on_all_ranks", "write_errors",
]  # fmt: skip
