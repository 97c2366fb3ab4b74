"""The one exception type of this package."""

from forge_data._shared.problems import WithProblems

__all__ = ["InvalidData"]


class InvalidData(WithProblems, ValueError):
    """Data on disk is missing, truncated, changed, damaged or not text, or the code of a source cannot read it.

    It is a ValueError, so that one `except` also catches bad arguments, and a class of its own, so
    that a command line can return exit code 65 for data and 78 for arguments. `problems` has key, code, value, rule and
    fix of each.
    """
