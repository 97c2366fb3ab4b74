"""Exit codes of a training process, for its scheduler, and whether a job is started again.

Four limits count restarts. They nest, and each end is counted by one of them:

    WatchConfig.max_restarts      the supervisor of one node: crashes and hangs since it was started
    SlurmConfig.retries           the batch script, since Slurm started it: crashes, of ranks on any number of nodes
    SlurmConfig.max_restarts      the batch script, over all of its starts: attempts after the first, retries too
    orchestrate(max_restarts=)    the orchestrator: submissions after a stop or a lost job, in place of the limit before
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum

__all__ = ["FINAL_CODES", "ExitCode", "History", "NoRestart", "may_restart"]


class ExitCode(IntEnum):
    """Exit codes of a job; 64 and above follow BSD's sysexits where one fits.

    A batch script starts the same command again for REQUEUE, and for HARDWARE if `JobFacts.broken_nodes` names the
    nodes to leave out. Other members but ERROR end the job. After ERROR, any code that is no member, and a death by
    a signal the script goes on if a node was lost, if a stop came first and ranks died of a signal, or, on the same
    nodes, within `SlurmConfig.retries`.
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


#: Codes after which a supervisor starts no ranks again: another attempt would end alike, or is the scheduler's.
FINAL_CODES = frozenset(ExitCode) - {ExitCode.ERROR}
_MOST_WITHOUT_PROGRESS = 2


class NoRestart(Enum):
    """Why a job is not started again."""

    EXCLUDED = "another attempt cannot begin here, or would end alike"
    NO_PROGRESS = "two attempts in a row made no progress"
    RESTARTS = "the restarts are used up"


@dataclass(frozen=True, kw_only=True)
class History:
    """The attempts of a job so far, as the process that starts them counts them.

    may_help: whether another attempt can begin here and may end differently; False after a stop on request.
    without_progress: attempts in a row without progress; 0 where another process counts them.
    """

    may_help: bool
    restarts: int
    max_restarts: int
    without_progress: int = 0


def may_restart(history: History) -> NoRestart | None:
    """Return None if the job may be started again, else the reason why not; the first reason counts.

    The supervisor and the orchestrator ask this function, each with its own counter. The batch script asks in bash: when
    an attempt has ended, whether the job was cancelled and then in this order; at its own start, restarts before
    progress. docs/life-of-a-stop.md of the repository says which counter applies to which end.
    """
    if not history.may_help:
        return NoRestart.EXCLUDED
    if history.without_progress >= _MOST_WITHOUT_PROGRESS:
        return NoRestart.NO_PROGRESS
    if history.restarts >= history.max_restarts:
        return NoRestart.RESTARTS
    return None
