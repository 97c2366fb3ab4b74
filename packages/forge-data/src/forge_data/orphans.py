"""Worker processes that do not outlive the process they work for."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent dies, however that happens (Linux only).

    A forked worker holds copies of its parent's sockets: while it lives, peers do not see that the
    parent is gone.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() == 1:  # it died before the call above
        os._exit(1)
