"""Exit codes of a training process, for its scheduler."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of a job; 64 and above follow BSD's sysexits where one fits.

    A supervisor starts the same command again for REQUEUE and for nothing else.
    """

    DONE = 0
    """Finished; starting again has nothing to do."""
    ERROR = 1
    """Something unexpected; look before starting again."""
    DATA_ERROR = 65
    """Data is missing, damaged, changed, or does not fit the model (EX_DATAERR)."""
    CORRUPT_STATE = 66
    """Checkpoints exist and none of them verifies."""
    REQUEUE = 75
    """Stopped on request and saved; the same command continues (EX_TEMPFAIL)."""
    CONFIG_ERROR = 78
    """Configuration or command line is wrong; nothing was started (EX_CONFIG)."""
