"""Speed, waiting and memory of the steps since the last logged row."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass
class Pause:
    """How long training stood still."""

    seconds: float = 0.0


class Meter:
    """Counts tokens and seconds of training steps; evaluation and saving do not count.

    One object per window between two rows. No device synchronisation: on an accelerator the host is
    at most the step ahead of it that is queued before a row's values are read, at either end of a window.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.steps = 0
        self.wait_seconds = 0.0
        self.paused_seconds = 0.0
        self.started = time.perf_counter()

    def count(self, tokens: int) -> None:
        self.tokens += tokens
        self.steps += 1

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time spent waiting for data (part of the training time)."""
        start = time.perf_counter()
        yield
        self.wait_seconds += time.perf_counter() - start

    @contextmanager
    def paused(self) -> Iterator[Pause]:
        """Time that is not training: evaluation, checkpoints. Its seconds are known at the end."""
        pause, start = Pause(), time.perf_counter()
        try:
            yield pause
        finally:
            pause.seconds = time.perf_counter() - start
            self.paused_seconds += pause.seconds

    @property
    def seconds(self) -> float:
        return max(time.perf_counter() - self.started - self.paused_seconds, 1e-9)


def memory_bytes(device: torch.device) -> int:
    """Peak bytes of tensors on an accelerator; peak resident set of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
