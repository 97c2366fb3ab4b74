"""Exit codes of a training process, for its scheduler."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of a job; 64 and above follow BSD's sysexits where one fits.

    A batch script starts the same command again for REQUEUE, and for HARDWARE without the node that failed;
    for no other code.
    """

    DONE = 0
    """Finished; starting again has nothing to do."""
    ERROR = 1
    """Something unexpected; look before starting again."""
    DATA_ERROR = 65
    """Data is missing, damaged, changed, or does not fit the model (EX_DATAERR)."""
    CORRUPT_STATE = 66
    """Checkpoints exist and none of them verifies."""
    NO_PROGRESS = 70
    """Started again and again without a new checkpoint; starting it once more would do the same (EX_SOFTWARE)."""
    HARDWARE = 71
    """A device or node computes wrong or is broken; start again without it (EX_OSERR)."""
    REQUEUE = 75
    """Stopped on request and saved; the same command continues (EX_TEMPFAIL)."""
    NUMERICS = 76
    """Loss or gradients are not finite, or spike, more often than the policy allows."""
    CONFIG_ERROR = 78
    """Configuration or command line is wrong; nothing was started (EX_CONFIG)."""
