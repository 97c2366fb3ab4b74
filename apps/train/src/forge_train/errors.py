"""What a user can get wrong, each with the exit code that the shell and the scheduler see."""

from __future__ import annotations

from collections.abc import Sequence

from forge_resilience import ExitCode


class JobError(Exception):
    """A job that cannot run; `problems` are complete sentences with value, rule and fix."""

    exit_code = ExitCode.ERROR

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class ConfigError(JobError):
    """The configuration is wrong; nothing was started and nothing was written."""

    exit_code = ExitCode.CONFIG_ERROR


class DataError(JobError):
    """The data is missing, damaged, or does not fit the model."""

    exit_code = ExitCode.DATA_ERROR


class StateError(JobError):
    """No checkpoint of the run can be used."""

    exit_code = ExitCode.CORRUPT_STATE
