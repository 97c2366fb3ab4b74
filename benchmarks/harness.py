"""Measuring side by side: interleaved runs, medians with their spread, one JSON line.

Other load on a machine slows whatever runs at that moment. So alternatives take turns, step by step
and in changing order, ratios are taken within a round, and medians and quartiles are reported.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# From source, ahead of anything installed: what is measured is what lies beside this file.
sources = [*ROOT.glob("packages/*/src"), *ROOT.glob("apps/*/src")]
sys.path[:0] = [str(source) for source in sorted(sources)]

import torch  # noqa: E402


def nothing() -> None:
    """Do nothing."""


@dataclass
class Step:
    """A step with work that is not timed before and after it."""

    run: Callable[[], object]
    before: Callable[[], object] = nothing
    after: Callable[[], object] = nothing

    def __call__(self) -> object:
        return self.run()


class Seconds(float):
    """Result of a step that timed itself, in another process."""


def interleave(
    steps: Mapping[str, Callable[[], object]],
    rounds: int,
    warmup: int,
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each step, one entry a round; the order within a round is reversed in every other one."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(-warmup, rounds):
        for name in list(steps) if index % 2 else list(steps)[::-1]:
            step = steps[name]
            getattr(step, "before", nothing)()
            synchronise(device)
            start = clock()
            result = step()
            synchronise(device)
            taken = result if isinstance(result, Seconds) else clock() - start
            getattr(step, "after", nothing)()
            if index >= 0:
                seconds[name].append(float(taken))
    return seconds


def synchronise(device: torch.device) -> None:
    """Wait for a GPU's queue; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles, least and number of values."""
    quarters = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    low, _, high = quarters
    return {
        "median": statistics.median(values),
        "q1": low,
        "q3": high,
        "min": min(values),
        "n": len(values),
    }


def ratios(other: Sequence[float], ours: Sequence[float]) -> dict[str, float]:
    """How many times faster `ours` was, round by round: over 1 is faster."""
    return spread([a / b for a, b in zip(other, ours, strict=True)])


def environment(device: torch.device) -> dict[str, Any]:
    """What a figure depends on besides the code."""
    is_cuda = device.type == "cuda"
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if is_cuda else _cpu_name(),
        "load_before": None if not hasattr(os, "getloadavg") else round(os.getloadavg()[0], 2),
        "commit": _commit(),
    }


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """Short commit of the source, with a plus sign if tracked files were changed since."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    return None


def emit(benchmark: str, device: torch.device, **content: Any) -> None:
    """Print the one JSON line: floats to four significant digits."""
    line = {"benchmark": benchmark, "environment": environment(device), **content}
    print(json.dumps(rounded(line)), flush=True)


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value
