# Copied from scripts/shared/parents.py; edit that file, then run scripts/copy_shared.py.
"""Processes that die with their parent (Linux; elsewhere nothing happens).

subprocess.Popen(command, preexec_fn=with_parent(signal.SIGTERM))
multiprocessing.get_context("fork").Process(target=lambda: (die_with(parent), work()))    # parent = os.getpid(), before
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1  # of prctl(2)


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send `number` to this process when its parent ends; exit now if it is no longer `parent`.

    Linux counts the end of the thread that made this process: let one make it that ends no earlier. An orphan may be adopted
    by process 1 or by a supervisor, so its parent is compared with the pid that made it. The parent must have made this
    process itself, as `fork` does and multiprocessing's forkserver does not.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call above
        os._exit(1)


def with_parent(number: int = signal.SIGKILL) -> Callable[[], None]:
    """A `preexec_fn`: the child dies with this process."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None)  # loaded before the fork
    parent = os.getpid()
    return lambda: die_with(parent, number)
