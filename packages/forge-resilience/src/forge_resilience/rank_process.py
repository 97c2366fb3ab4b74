"""The process of a command that may be one rank of many, before its training loop: streams, signals, its launcher.

prepare(is_run=True)           # first of all
met = leave_with_launcher()    # a rank whose launcher is gone must not wait for the others
init_process_group()
met()
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from forge_resilience._shared.streams import tolerate
from forge_resilience.exit_codes import ExitCode
from forge_resilience.heartbeat import Heartbeat
from forge_resilience.stop import StopSignal, leave_on_signal, leave_with_parent

__all__ = ["early_stop", "is_rank_of_many", "leave_with_launcher", "may_supervise", "prepare"]


def is_rank_of_many() -> bool:
    """Whether a launcher started several ranks; read from the environment, before anything heavy is imported."""
    worlds = (os.environ.get(name, "") for name in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS"))
    return any(world.isdecimal() and int(world) > 1 for world in worlds)


def may_supervise() -> bool:
    """Whether no launcher or supervisor has started this process: it may start its ranks, and watch them."""
    return not is_rank_of_many() and "FORGE_LIFE" not in os.environ


#: Opened as early as can be in a rank of many, where a stop is for all ranks to agree on.
early_stop = StopSignal(announce=os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0")


# pid of our launcher on this machine, because a rank that is to stop early leaves if that is gone; 0 for others
_launcher = 0


def leave_with_launcher() -> Callable[[], None]:
    """`leave_with_parent` for the launcher of this rank, if it has one on this machine."""
    return leave_with_parent(early_stop, _launcher) if _launcher else lambda: None


def prepare(is_run: bool) -> None:
    """Prepare for streams that fail, odd encodings, and, in a run, signals that come before its training loop handles them.

    Call it before anything heavy is imported. A signal does one of three things in a process: before the loop a single process
    leaves with 75, and a rank of many keeps the flag until ranks can vote; in the loop `StopSignal` of the trainer keeps it,
    too; after the run `leave_on_signal` ends any process at once with the run's code.
    """
    tolerate()
    if not is_run:
        return
    if is_rank_of_many():
        early_stop.__enter__()
        global _launcher
        _launcher = os.getppid() if "FORGE_NPROC" in os.environ else 0
        Heartbeat.from_environ()  # a rank that hangs while it imports can be asked for its stacks
    else:  # until the loop has a handler of its own: nothing is lost yet, so the job is requeued
        # Not by an exception: torch and numpy import from C code, which drops it or keeps a lock.
        leave_on_signal(ExitCode.REQUEUE, signal.SIGINT)
