"""Errors that a user can cause, each with the exit code that the shell and the scheduler see."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from forge_resilience import Agreement, ExitCode

T = TypeVar("T")
Report = list[int | str] | None
"""The error of a rank, for the others: exit code and problems; None without one."""


class JobError(Exception):
    """A job that cannot run; `problems` are complete sentences with value, rule and fix.

    `shared`: every rank of the job raises it, so one of them prints it.
    """

    exit_code = ExitCode.ERROR
    shared = False

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


class NumericsError(JobError):
    """More steps than allowed had a loss or gradient norm that is not finite, or a spike."""

    exit_code = ExitCode.NUMERICS


class HardwareError(JobError):
    """A device or a node is broken or computes wrong."""

    exit_code = ExitCode.HARDWARE


def refuse(problems: Sequence[str]) -> None:
    """Raise a ConfigError if there are problems."""
    if problems:
        raise ConfigError(problems)


@contextlib.contextmanager
def config_errors() -> Iterator[None]:
    """Raise a ValueError of the configuration, or an ImportError of a missing package, as a ConfigError."""
    try:
        yield
    except (ValueError, ImportError) as error:
        raise ConfigError(str(error).splitlines()) from error


def run_on_all_ranks(agreement: Agreement, action: Callable[[], T]) -> T:
    """`action()` on every rank; a JobError of one is raised by all, with its exit code.

    Another exception, a mistake in a user's code, is raised unchanged where it happened, and the other ranks
    raise a JobError that names that rank. Cost: two small collectives between hosts; none with one process.
    """
    result: T | None = None
    own: Exception | None = None
    report: Report = None
    try:
        result = action()
    except JobError as error:
        own, report = error, [int(error.exit_code), *error.problems]
    except Exception as error:
        own, report = error, [int(ExitCode.ERROR), f"{type(error).__name__}: {error}"]
    reports = agreement.exchange(report)
    if own is not None and not isinstance(own, JobError):
        raise own
    raise_reported(reports)
    return result  # type: ignore[return-value]


def raise_reported(reports: Sequence[Report]) -> None:
    """Raise the errors that ranks reported, on every rank alike; nothing if there are none."""
    failed = {rank: report for rank, report in enumerate(reports) if report}
    if not failed:
        return
    first = next(iter(failed.values()))[0]
    known = (ConfigError, DataError, StateError, NumericsError, HardwareError)
    kinds = {kind.exit_code: kind for kind in known}
    # A dict keeps the order, and a problem that several ranks report once.
    problems: dict[str, None] = {}
    for rank, (_, *sentences) in failed.items():
        alone = len(reports) > 1 and len(failed) < len(reports)
        problems.update(dict.fromkeys(f"rank {rank}: {s}" if alone else str(s) for s in sentences))
    raise kinds.get(ExitCode(int(first)), JobError)(list(problems))
