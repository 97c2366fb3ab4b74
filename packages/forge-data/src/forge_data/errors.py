"""The one exception type of this package."""


class DataError(ValueError):
    """What is on disk is not what it should be: missing, truncated, changed or not text.

    A ValueError, so that one `except` catches it together with bad arguments; a type of its own, so
    that a command line can tell "your data" (exit code 65) from "your arguments" (78). The message
    names the value, the rule and the fix.
    """
