"""The exception of data that cannot be used, and the way to raise it with one problem."""

from typing import Any

from forge_data._shared.problems import Problem, WithProblems

__all__ = ["InvalidData", "invalid_data"]


class InvalidData(WithProblems, ValueError):
    """Data on disk is missing, truncated, changed, damaged or not text, or the code of a source cannot read it.

    It is a ValueError, so that one `except` also catches bad arguments, and a class of its own, so
    that a command line can return exit code 65 for data and 78 for arguments. `problems` has key, code, value, rule and
    fix of each.
    """


def invalid_data(
    key: str, code: str, value: Any, rule: str, fix: str, *, where: object = ""
) -> InvalidData:
    """InvalidData with one problem, as `invalid` makes it."""
    return InvalidData([Problem(key, code, value, rule, fix)], str(where))
