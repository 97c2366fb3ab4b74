"""Exceptions, one class for each reaction of a caller."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from forge_ckpt._shared.problems import Problem, WithProblems, invalid, problems_of

_SHOWN_DIFFERENCES = 8
# Compared by name, as each package has a copy of the module and of its classes.
_PROBLEMS = "._shared.problems"


def one_line(text: str, limit: int | None = 300) -> str:
    """The first ``limit`` characters of ``text``; escapes for what no log or terminal should get, which names
    from a disk may hold."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[:limit])


class CorruptCheckpoint(WithProblems, RuntimeError):
    """The bytes on disk are not those that were saved. The message names the file and the bytes."""


class CheckpointMismatch(WithProblems, ValueError):
    """The checkpoint is sound, but of another state: shapes, dtypes or names differ."""


class StateRefused(RuntimeError):
    """A ``load_state_dict`` raised after other objects had been loaded (internal)."""


class StepExists(WithProblems, ValueError):
    """This step is already saved with another content; nothing on disk is replaced."""


class StoreInUse(WithProblems, RuntimeError):
    """Another live process writes to the store. The message names it."""


def is_problem_error(error: BaseException) -> bool:
    """Whether it is the ProblemError of some package: a ValueError without a meaning of its own."""
    return type(error).__module__.endswith(_PROBLEMS)


def has_problems(error: BaseException) -> bool:
    """Whether its class is derived from some package's WithProblems."""
    return any(kind.__module__.endswith(_PROBLEMS) for kind in type(error).__mro__)


def corrupt(where: object, key: str, value: Any, rule: str, *, code: str) -> Any:
    """A CorruptCheckpoint of one problem in the file ``where``, to be raised."""
    return invalid(key, code, value, rule, where=where, kind=CorruptCheckpoint)


def restated(error: BaseException, where: object, kind: type[Any] = CorruptCheckpoint) -> Any:
    """A ``kind`` with the problems of ``error``, to be raised; names from a disk get escapes."""
    found = [replace(p, key=one_line(p.key), rule=one_line(p.rule)) for p in problems_of(error)]
    return kind(found, ": ".join(filter(None, (str(where), getattr(error, "where", "")))))


def mismatch(header: Problem, differences: Sequence[Problem]) -> CheckpointMismatch:
    """The error of ``header`` and the first of the ``differences``, to be raised."""
    more = len(differences) - _SHOWN_DIFFERENCES
    rest = [Problem("", "more", more, "more differences are not shown")] if more > 0 else []
    return CheckpointMismatch([header, *differences[:_SHOWN_DIFFERENCES], *rest])
