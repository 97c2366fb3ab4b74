"""The one exception type of this package."""


class InvalidData(ValueError):
    """Data on disk is missing, truncated, changed, damaged or not text, or the code of a source cannot read it.

    It is a ValueError, so that one `except` also catches bad arguments, and a class of its own, so
    that a command line can return exit code 65 for data and 78 for arguments. The message names the
    value, the rule and the fix.
    """
