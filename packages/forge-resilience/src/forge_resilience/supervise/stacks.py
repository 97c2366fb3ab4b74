"""Stacks of ranks that hang: asked for by SIGUSR2, written by faulthandler, read here."""

from __future__ import annotations

import re
import signal
import sysconfig
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from forge_resilience._shared.paths import read_regular
from forge_resilience.heartbeat import Beat
from forge_resilience.supervise.process_tree import catches, signal_process, state

__all__ = ["Stack", "collect_stacks"]

_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
_STDLIB = sysconfig.get_paths()["stdlib"]
_WAITS = {"wait", "wait_tensor", "synchronize", "barrier"}
_WRAPPERS = {"wrapper", "_fn", "inner"}
_MOST_BYTES = 2**26
_DEEP = 10  # frames from the top in which a collective is looked for


@dataclass(frozen=True)
class Stack:
    """Threads of one process, as faulthandler wrote them."""

    text: str

    @property
    def frames(self) -> list[tuple[str, str, str]]:
        """(file, line, function) of the main thread, innermost first."""
        main = self.text.strip().split("\n\n")[-1]  # faulthandler writes it last
        return [found.groups() for line in main.splitlines() if (found := _FRAME.match(line))]  # type: ignore[misc]

    @property
    def collective(self) -> str:
        """The collective or wait for other ranks in which the main thread is; "" if in none."""
        for file, _, function in self.frames[:_DEEP]:
            of_torch = "/torch/distributed/" in file and function not in _WRAPPERS
            waits = function in _WAITS and not file.startswith(_STDLIB)
            if of_torch or waits:
                return function
        return ""

    @property
    def place(self) -> str:
        """`function (file:line)` of the innermost frame that is not of a library."""
        frames = self.frames
        own = [
            f
            for f in frames
            if not f[0].startswith((_STDLIB, "<frozen")) and "/site-packages/" not in f[0]
        ]
        for file, line, function in own or frames:
            return f"{function} ({file}:{line})"
        return ""


def collect_stacks(folder: Path, beats: Iterable[Beat], seconds: float = 2.0) -> dict[int, Stack]:
    """Ask the processes of `beats` for their stacks, and wait up to `seconds` for them; by rank.

    A process that has no handler for SIGUSR2 is not asked, as it would die; one that is stopped, or in the kernel,
    does not answer.
    """
    waiting: dict[int, tuple[Path, int]] = {}
    for beat in beats:
        path = folder / f"rank-{beat.rank:05d}.stacks"
        size = len(_read(path))
        answers = (
            path.exists() and catches(beat.pid, signal.SIGUSR2) and state(beat.pid)[0] not in "Tt"
        )
        if answers and signal_process(beat.pid, beat.process_start, signal.SIGUSR2):
            waiting[beat.rank] = path, size
    found: dict[int, Stack] = {}
    deadline = time.monotonic() + seconds
    while waiting and time.monotonic() < deadline:
        time.sleep(0.02)  # polling files
        for rank, (path, size) in list(waiting.items()):
            text = _read(path)[size:].decode(errors="replace")
            if text and text == found.get(rank, Stack("")).text:  # it has stopped growing
                del waiting[rank]
            elif text:
                found[rank] = Stack(text)
    return found


def _read(path: Path) -> bytes:
    try:
        return read_regular(path, _MOST_BYTES)
    except (OSError, ValueError):
        return b""
