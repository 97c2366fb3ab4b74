"""What a user can get wrong, each with the exit code that the shell and the scheduler see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from forge_resilience import Agreement, ExitCode

T = TypeVar("T")


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


def together(agreement: Agreement, action: Callable[[], T]) -> T:
    """`action()` on every rank; a JobError of one is raised by all, with its exit code.

    What is no JobError, a mistake in somebody's code, is raised as it is where it happened; the other ranks
    raise a JobError that says whose it was. Cost: two small collectives between hosts; none with one process.
    """
    result: T | None = None
    mine: Exception | None = None
    said: list[Any] | None = None
    try:
        result = action()
    except JobError as error:
        mine, said = error, [int(error.exit_code), *error.problems]
    except Exception as error:
        mine, said = error, [int(ExitCode.ERROR), f"{type(error).__name__}: {error}"]
    told = agreement.exchange(said)
    if mine is not None and not isinstance(mine, JobError):
        raise mine
    share_errors(told)
    return result  # type: ignore[return-value]


def share_errors(told: Sequence[list | None]) -> None:
    """Raise, on every rank alike, what ranks told: exit code and problems, or None."""
    failed = {rank: said for rank, said in enumerate(told) if said}
    if not failed:
        return
    first = next(iter(failed.values()))[0]
    kinds = {kind.exit_code: kind for kind in (ConfigError, DataError, StateError)}
    problems: dict[str, None] = {}  # in order, what several ranks say once
    for rank, (_, *said) in failed.items():
        alone = len(told) > 1 and len(failed) < len(told)
        problems.update(dict.fromkeys(f"rank {rank}: {p}" if alone else p for p in said))
    raise kinds.get(ExitCode(first), JobError)(list(problems))


def as_config_error(build: Callable[[], Any]) -> Any:
    """What `build` makes of a configuration; what it refuses, or lacks a package for, as a ConfigError."""
    try:
        return build()
    except (ValueError, ImportError) as error:
        raise ConfigError(str(error).splitlines()) from error
