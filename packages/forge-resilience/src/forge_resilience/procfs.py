"""Processes of this host: what /proc says of them, and how those below this one are signalled and ended.

Linux; elsewhere, and of a process that has ended, nothing is found.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Container

_PR_SET_CHILD_SUBREAPER = 36
_PATIENT_SECONDS = 0.3  # processes that notice the end of their parent need so long
_KILL_SECONDS = 10.0
_STATES = {"T": "stopped by a signal (SIGSTOP, SIGTSTP)", "t": "stopped by a debugger"}
_STATES |= {"D": "in uninterruptible sleep in the kernel", "Z": "ended", "X": "ended"}


def pids() -> list[int]:
    """All processes of this host that this one sees."""
    with contextlib.suppress(OSError):
        return sorted(int(name) for name in os.listdir("/proc") if name.isdecimal())
    return []


def read(pid: int, name: str) -> bytes:
    """The content of /proc/PID/NAME."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read()
    return b""


def stat(pid: int) -> list[str]:
    """Fields of `stat` after the name: 0 is the state, 1 the parent, 3 the session, 19 the start in ticks since boot."""
    return read(pid, "stat").rpartition(b")")[2].decode().split()


def status(pid: int) -> dict[str, str]:
    """The lines of `status`."""
    lines = read(pid, "status").decode(errors="replace").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def environ(pid: int) -> dict[str, str]:
    """The environment that a process was started with."""
    entries = read(pid, "environ").decode(errors="replace").split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def process_start(pid: int) -> int:
    """Start of a process in clock ticks since boot; 0 if it does not exist, and off Linux."""
    fields = stat(pid)
    return int(fields[19]) if fields else 0


def descendants(pid: int, keep: Container[int] = ()) -> dict[int, str]:
    """Pid -> state (a letter of `stat`) of the processes below `pid`, nearest first, without those in `keep` and below.

    Costs a read for each process of this host.
    """
    children: dict[int, list[tuple[int, str]]] = {}
    for child in pids():
        fields = stat(child)
        if fields:
            children.setdefault(int(fields[1]), []).append((child, fields[0]))

    found: dict[int, str] = {}
    level = [pid]
    while level:
        below = [child for parent in level for child in children.get(parent, ())]
        below = [child for child in below if child[0] not in keep]
        found.update(below)
        level = [child for child, _ in below]
    return found


# ---- processes below this one


def adopt_orphans(adopt: bool = True) -> None:
    """Make descendants whose parent dies children of this process, not of init, so that no descendant is lost."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)


def detached() -> set[int]:
    """Processes below this one that took a session of their own (`setsid`): they are meant to outlive it."""
    session = str(os.getsid(0))
    found = ((pid, stat(pid)) for pid in descendants(os.getpid()))
    return {pid for pid, fields in found if fields and fields[3] != session}


def collect_adopted(keep: Container[int]) -> None:
    """Collect ended children of this process that have no other owner; those in `keep` have one."""
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is None or found.si_pid in keep:
                return
            os.waitpid(found.si_pid, os.WNOHANG)
        except ChildProcessError:
            return


def is_below(pid: int, ancestor: int) -> bool:
    """Whether `ancestor` is a parent of the process, at any depth."""
    while pid > 1 and (fields := stat(pid)):
        pid = int(fields[1])
        if pid == ancestor:
            return True
    return False


def end_descendants(grace_seconds: float, keep: Container[int] = ()) -> int:
    """End all processes below this one except `keep`, with SIGKILL after the grace, and collect them.

    Without a grace SIGKILL comes at once; with one they have a moment to end by themselves. Returns how many were signalled.
    """
    signalled: set[int] = set()
    patient_until = time.monotonic() + min(_PATIENT_SECONDS, grace_seconds)
    deadline = time.monotonic() + grace_seconds

    while True:
        found = descendants(os.getpid(), keep)
        alive = {pid for pid, letter in found.items() if letter != "Z" or not _collect(pid)}
        now = time.monotonic()
        if not alive or now >= deadline + _KILL_SECONDS:
            return len(signalled)

        if now >= patient_until:
            late = now >= deadline
            for pid in alive if late else alive - signalled:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
            signalled |= alive
        time.sleep(0.02)  # nothing reports the end of a process that is no child


def _collect(pid: int) -> bool:
    """Collect an ended process; False while some of its threads have not ended yet."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:  # the child of another one, which collects it
        return True


def state(pid: int) -> tuple[str, str]:
    """(letter, description) of the state of a process: "T" is stopped; the description may be empty."""
    fields = stat(pid)
    if not fields:
        return "X", _STATES["X"]
    words = _STATES.get(fields[0], "")
    if fields[0] == "D":
        where = read(pid, "wchan").decode().strip("0\n ")
        words += f" ({where})" if where else ""
    return fields[0], words


def is_traced(pid: int) -> bool:
    """Whether a debugger holds the process."""
    return status(pid).get("TracerPid", "0") != "0"


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal, so that it does not die of it."""
    return bool(int(status(pid).get("SigCgt", "0"), 16) >> (number - 1) & 1)


def signal_process(pid: int, start: int, number: int) -> bool:
    """Signal the process that began at `start` (0: whichever it is); False if it is gone, and the pid perhaps another's."""
    try:
        handle = os.pidfd_open(pid)
    except (OSError, AttributeError):
        return False
    try:
        with contextlib.suppress(OSError):
            if not start or process_start(pid) == start:
                signal.pidfd_send_signal(handle, number)
                return True
        return False
    finally:
        os.close(handle)


def send(pid: int, number: int) -> None:
    """Send a signal; do nothing if the process has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def abort(pid: int) -> None:
    """Send SIGABRT without a core file: a Python with faulthandler on (PYTHONFAULTHANDLER) writes its stacks to stderr."""
    if catches(pid, signal.SIGABRT):
        with contextlib.suppress(OSError, ValueError):
            most = resource.prlimit(pid, resource.RLIMIT_CORE)[1]
            resource.prlimit(pid, resource.RLIMIT_CORE, (0, most))
        signal_process(pid, 0, signal.SIGABRT)
