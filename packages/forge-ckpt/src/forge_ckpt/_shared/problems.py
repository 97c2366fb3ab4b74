# Copied from scripts/shared/problems.py; edit that file, then run scripts/copy_shared.py.
"""Problems with values that a user gave: data, from which the text of an error is made.

    def problems(config):
        if config.dim % config.num_heads:
            yield Problem("num_heads", "divides", config.num_heads, f"must divide dim {config.dim}", "use 1, 2 or 4")

    raise_problems("model", problems(config))       # one ValueError for all of them
    raise invalid("step", "range", step, "must be at least 0", "use 0")
    raise invalid("", "not_json", ..., f"is not JSON: {error}", where=path, kind=InvalidData)

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
    value: what was given; `...` if no single value is at fault, and the text shows none.
    rule, fix: the rest of the sentence, as "must be at least 1" and "use 2". `fix` may be empty.
    origin: the file or flag that gave the value; may be empty.
    """

    key: str
    code: str
    value: Any
    rule: str
    fix: str = ""
    origin: str = ""

    def __str__(self) -> str:
        shown = "" if self.value is ... else show(self.value)
        text = " ".join(word for word in (self.key, shown, self.rule) if word)
        text = f"{text}; {self.fix}" if self.fix else text
        return f"{text} [{self.origin}]" if self.origin else text

    def under(self, table: str) -> Problem:
        """The problem with the key of a table: `lr` under `optimizer` is `optimizer.lr`."""
        return dataclasses.replace(
            self, key=f"{table}.{self.key}".lstrip(".") if self.key else table
        )


class WithProblems(Exception):
    """Base of exceptions that know their problems; `key` and `code` are those of the first.

    `where`, as a file, begins each line of the text. A plain text has no problems, for errors that are not about values.
    """

    def __init__(self, problems: Iterable[Problem] | str, where: str = "") -> None:
        text = problems if isinstance(problems, str) else ""
        self.problems = () if isinstance(problems, str) else tuple(problems)
        self.where = where
        self.key, self.code = (self.problems[0].key, self.problems[0].code) if self.problems else ("", "")  # fmt: skip
        prefix = f"{where}: " if where else ""
        lines = [str(problem) for problem in self.problems] or [text]
        super().__init__("\n".join(prefix + line for line in lines))

    def __reduce__(self) -> Any:  # workers and ranks send errors to each other
        return type(self), (self.problems or str(self), self.where if self.problems else "")


class ProblemError(WithProblems, ValueError):
    """A ValueError that knows its problems."""


def invalid(
    key: str,
    code: str,
    value: Any,
    rule: str,
    fix: str = "",
    *,
    where: object = "",
    kind: type[Any] = ProblemError,
) -> Any:
    """The error of one problem, to be raised: a ProblemError, or another kind of WithProblems."""
    return kind([Problem(key, code, value, rule, fix)], str(where))


def raise_problems(where: str, problems: Iterable[Problem], kind: type[Any] = ProblemError) -> None:
    """Raise one error for all problems, each line after `where:`; do nothing without any."""
    found = list(problems)
    if found:
        raise kind(found, where)


def problems_of(error: BaseException) -> tuple[Problem, ...]:
    """The problems that an error carries, whichever package raised it.

    An error without problems is one problem without key and value, with the code `error` and the text as its rule.
    """
    found = tuple(getattr(error, "problems", ()))
    return found or tuple(Problem("", "error", ..., line) for line in str(error).splitlines())


class Shown(str):
    """The text of a value that another process showed; it stands in messages without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def show(value: Any) -> str:
    """A value as messages show it, at most 200 characters long."""
    if isinstance(value, int) and value.bit_length() > 1000:  # Python refuses to print more digits
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
