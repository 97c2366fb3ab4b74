"""A parent process that ends all processes when the supervisor itself is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable

from forge_resilience._shared.parents import die_with
from forge_resilience.exit_codes import ExitCode
from forge_resilience.procfs import adopt_orphans, descendants, detached, end_descendants, send
from forge_resilience.stop import STOP_SIGNALS, install_handlers


def run_guarded(run: Callable[[int | None], int], grace_seconds: float = 10.0) -> int:
    """Run `run(pid of this process)` in a forked child that gets this process's signals; return its exit code.

    If the child dies by a signal, all that it started gets TERM and, after the grace, KILL. If this process is
    killed, the child gets TERM from the kernel and does the same. So one SIGKILL leaves no process.
    Call it before threads start, on the main thread. Off Linux `run(None)` runs here.
    """
    if not sys.platform.startswith("linux"):
        return run(None)
    adopt_orphans()
    parent = os.getpid()
    others = set(descendants(parent))  # started before, and not ours to end

    # until both processes have handlers, else a signal in between would end one of them
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

    pid = os.fork()
    if pid == 0:
        code: int = ExitCode.ERROR

        try:
            die_with(parent, signal.SIGTERM)
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            code = run(parent)
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else ExitCode.ERROR
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
        finally:
            for stream in (sys.stdout, sys.stderr):  # None where the caller had closed it
                with contextlib.suppress(OSError, ValueError, AttributeError):
                    stream.flush()
            os._exit(code)

    install_handlers(lambda number, _: send(pid, number))
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code >= 0:
        # none but what a run that is done had detached, unless the supervisor failed
        end_descendants(0.0, others | (detached() if code == ExitCode.DONE else set()))
        return code

    died, name = time.monotonic(), signal.Signals(-code).name
    count = end_descendants(grace_seconds, others)
    ended = f"ended {count} processes below it in {time.monotonic() - died:.1f} s"
    text = f"supervise: the supervisor (pid {pid}) died by {name}; {ended}"
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
    return ExitCode.ERROR
