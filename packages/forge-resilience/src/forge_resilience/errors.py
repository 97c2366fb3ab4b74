"""Errors that a user can cause, each with the exit code that the shell and the scheduler see.

config = run_on_all_ranks(agreement, read_config)     # a ConfigError of one rank is raised by all
sys.exit(error.exit_code)                             # in `except JobError as error:` of main
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from forge_resilience._shared.limits import limit_problem, problems_under
from forge_resilience._shared.problems import Problem, Shown, WithProblems, problems_of, show
from forge_resilience.exit_codes import ExitCode

if TYPE_CHECKING:
    from forge_resilience.agreement import Agreement

__all__ = [
    "ConfigError", "DataError", "HardwareError", "JobError", "NumericsError", "Report", "StateError",
    "as_config_error", "config_errors", "data_errors", "job_errors", "of_limit", "problems_at", "problems_under",
    "raise_reported", "received", "refuse", "report_of", "run_on_all_ranks", "write_errors",
]  # fmt: skip

T = TypeVar("T")
Report = list[Any] | None
"""The error of a rank, for the others: exit code, and each problem as plain data; None without one."""


class JobError(WithProblems):
    """A job that cannot run. A text among its problems, for an error that is not about a value, has the code `error`.

    `shared`: every rank of the job raises it, so one of them prints it. `printed`: the text that a parser made of it.
    """

    # Any, because each package has a Problem class of its own
    problems: tuple[Any, ...]
    exit_code = ExitCode.ERROR
    shared = False
    printed = ""

    def __init__(self, problems: Iterable[Any] | str, where: str = "") -> None:
        given = [problems] if isinstance(problems, str) else problems
        found = (Problem("", "error", ..., p) if isinstance(p, str) else p for p in given)
        super().__init__(found, where)

    @property
    def lines(self) -> list[str]:
        """The text of each problem."""
        where = f"{self.where}: " if self.where else ""
        return self.printed.splitlines() or [f"{where}{problem}" for problem in self.problems]


@dataclasses.dataclass(frozen=True)
class RankProblem(Problem):
    """A problem that a rank reported; `rank` is None if all ranks have it. `where` as in WithProblems."""

    rank: int | None = None
    where: str = ""

    def __str__(self) -> str:
        rank = "" if self.rank is None else f"rank {self.rank}: "
        return rank + (f"{self.where}: " if self.where else "") + super().__str__()


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


def of_limit(error: JobError) -> JobError:
    """Return the error, or an error about the limit of memory or descriptors that caused it."""
    problem = limit_problem(error)
    return error if problem is None else JobError([problem])


def refuse(problems: Iterable[Any]) -> None:
    """Raise a ConfigError if there are problems, of whichever package, or texts."""
    if found := list(problems):
        raise ConfigError(found)


def problems_at(error: BaseException, origin: object) -> list[Any]:
    """Return the problems of an error with the origin of their values: `origin`, and the file of the error."""
    places = ", ".join(str(place) for place in (origin, getattr(error, "where", "")) if place)
    return [dataclasses.replace(p, origin=p.origin or places) for p in problems_of(error)]


def as_config_error(error: BaseException) -> ConfigError:
    """Convert an error to a ConfigError with its problems and file."""
    return ConfigError(problems_of(error), getattr(error, "where", ""))


@contextlib.contextmanager
def config_errors(table: str = "") -> Iterator[None]:
    """Raise a ValueError of the configuration, or an ImportError of a missing package, as a ConfigError.

    Its problems keep their keys, below `table` if there is one.
    """
    try:
        yield
    except (ValueError, ImportError) as error:
        if table:
            raise ConfigError(problems_under(error, table)) from error
        raise as_config_error(error) from error


@contextlib.contextmanager
def data_errors(table: str, *kinds: type[Exception]) -> Iterator[None]:
    """Raise exceptions of these kinds as a DataError, with the keys of their problems below `table`."""
    try:
        yield
    except kinds as error:
        raise DataError(problems_under(error, table)) from error


@contextlib.contextmanager
def job_errors(what: str = "") -> Iterator[None]:
    """Raise a RuntimeError or OSError of the block as a JobError, after the words `what`."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise JobError(f"{what}{error}") from error


@contextlib.contextmanager
def write_errors(
    key: str, path: object, fix: str, kind: type[JobError] = ConfigError, room: str = ""
) -> Iterator[None]:
    """Raise an OSError of the block as one problem of `kind`: `path`, the value of `key`, cannot be written.

    With `room`, a rule such as "has no room", its code is `room`, else `write`.
    """
    try:
        yield
    except OSError as error:
        rule = f"{room or 'cannot be written'} ({error.strerror or error})"
        found = Problem(key, "room" if room else "write", str(path), rule, fix)
        raise kind([found]) from error


def run_on_all_ranks(agreement: Agreement, action: Callable[[], T]) -> T:
    """Run `action()` on every rank; a JobError of one rank is raised by all, with its exit code.

    Another exception, a mistake in a user's code, is raised unchanged where it happened, and the other ranks
    raise a JobError that names that rank. Cost: two small collectives between hosts; none with one process.
    """
    result: T | None = None
    own: Exception | None = None
    report: Report = None
    try:
        result = action()
    except JobError as error:
        own, report = error, report_of(error)
    except Exception as error:
        own, report = error, [int(ExitCode.ERROR), f"{type(error).__name__}: {error}"]
    reports = agreement.exchange(report)
    if own is not None and not isinstance(own, JobError):
        raise own
    raise_reported(reports)
    return result  # type: ignore[return-value]


def report_of(error: JobError) -> list[Any]:
    """Convert an error to plain data for the other ranks; a value becomes the text that messages show."""
    error, report = of_limit(error), list[Any]()
    for p in error.problems:
        value, where = None if p.value is ... else show(p.value), getattr(p, "where", error.where)
        report.append([p.key, p.code, value, p.rule, p.fix, p.origin, where])
    return [int(error.exit_code), *report]


def raise_reported(reports: Sequence[Report]) -> None:
    """Raise the errors that ranks reported, on every rank alike; nothing if there are none.

    A report holds an exit code and problems, as `report_of` makes them; a text is a problem without key.
    """
    failed = {rank: report for rank, report in enumerate(reports) if report}
    if not failed:
        return
    first = next(iter(failed.values()))[0]
    known = (ConfigError, DataError, StateError, NumericsError, HardwareError)
    kinds = {kind.exit_code: kind for kind in known}
    # A dict, because it keeps the order, and a problem that several ranks report only once.
    problems: dict[str, Problem] = {}
    for rank, (_, *reported) in failed.items():
        for data in reported:
            found = received(data, rank if len(failed) < len(reports) else None)
            problems.setdefault(str(found), found)
    raise kinds.get(ExitCode(int(first)), JobError)(problems.values())


def received(data: str | list[Any], rank: int | None = None) -> RankProblem:
    """Convert a problem of a report back; `rank` as in RankProblem."""
    if isinstance(data, str):
        data = ["", "error", None, data, "", "", ""]
    key, code, value, rule, fix, origin, where = data
    shown = ... if value is None else Shown(value)
    return RankProblem(key, code, shown, rule, fix, origin, rank, where)
