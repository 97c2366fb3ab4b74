"""Problems with values that a user gave: data, from which the text of an error is made.

    def problems(config):
        if config.dim % config.num_heads:
            yield Problem("num_heads", "divides", config.num_heads, f"must divide dim {config.dim}", "use 1, 2 or 4")

    raise_problems("model", problems(config))       # one ValueError for all of them
    raise invalid("step", "range", step, "must be at least 0", "use 0")

Callers and tests read `error.problems`: key, code and value are stable, the text is not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_SHOWN = 200  # characters of a value


@dataclass(frozen=True)
class Problem:
    """A value that breaks a rule, and how to fix it.

    key: the dotted key, or the name of the argument; "" for an input that has none, as a file.
    code: the rule, short and stable: one key has one code for each rule that it can break.
    value: what was given.
    rule, fix: the rest of the sentence, as "must be at least 1" and "use 2". `fix` may be empty.
    """

    key: str
    code: str
    value: Any
    rule: str
    fix: str = ""

    def __str__(self) -> str:
        words = [word for word in (self.key, show(self.value), self.rule) if word]
        return "; ".join([" ".join(words), self.fix] if self.fix else [" ".join(words)])

    def under(self, table: str) -> Problem:
        """The problem with the key of a table: `lr` under `optimizer` is `optimizer.lr`."""
        return dataclasses.replace(self, key=f"{table}.{self.key}" if self.key else table)


class ProblemError(ValueError):
    """A ValueError that knows its problems. `key` and `code` are those of the first."""

    def __init__(self, problems: Iterable[Problem], where: str = "") -> None:
        self.problems, self.where = tuple(problems), where
        self.key, self.code = self.problems[0].key, self.problems[0].code
        prefix = f"{where}: " if where else ""
        super().__init__("\n".join(f"{prefix}{problem}" for problem in self.problems))

    def __reduce__(self) -> Any:  # workers and ranks send errors to each other
        return type(self), (self.problems, self.where)


def invalid(key: str, code: str, value: Any, rule: str, fix: str = "") -> ProblemError:
    """The error of one problem, to be raised."""
    return ProblemError([Problem(key, code, value, rule, fix)])


def raise_problems(where: str, problems: Iterable[Problem]) -> None:
    """Raise one ProblemError for all problems, each line after `where:`; do nothing without any."""
    found = list(problems)
    if found:
        raise ProblemError(found, where)


def problems_of(error: BaseException) -> tuple[Problem, ...]:
    """The problems that an error carries, whichever package raised it; none for other errors."""
    return tuple(getattr(error, "problems", ()))


def show(value: Any) -> str:
    """A value as messages show it, at most 200 characters long."""
    if (
        isinstance(value, int) and value.bit_length() > 1000
    ):  # Python refuses to print thousands of digits
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
