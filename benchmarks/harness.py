"""Measuring side by side: interleaved runs, medians with their spread, counters, one JSON line.

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
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# From source, ahead of anything installed: what is measured is what lies beside this file.
sources = [*ROOT.glob("packages/*/src"), *ROOT.glob("apps/*/src")]
sys.path[:0] = [str(source) for source in sorted(sources)]

import torch  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402


def interleave(
    steps: Mapping[str, Callable[[], object]],
    rounds: int,
    warmup: int,
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each callable, one entry a round; the order within a round turns around each time."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(-warmup, rounds):
        for name in list(steps) if index % 2 else list(steps)[::-1]:
            synchronise(device)
            start = clock()
            steps[name]()
            synchronise(device)
            if index >= 0:
                seconds[name].append(clock() - start)
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


class _Operations(TorchDispatchMode):
    """Counts reads of single values by the host, and tensors whose storage is new."""

    def __init__(self) -> None:
        super().__init__()
        self.host_reads = self.new_tensors = self.new_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        self.host_reads += func is torch.ops.aten._local_scalar_dense.default
        known = {_storage(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for tensor in (x for x in tree_leaves(result) if isinstance(x, torch.Tensor)):
            if _storage(tensor) not in known:
                self.new_tensors += 1
                self.new_bytes += tensor.numel() * tensor.element_size()
        return result


def _storage(tensor: torch.Tensor) -> int:
    return 0 if type(tensor) is not torch.Tensor else tensor.untyped_storage().data_ptr()


def count(step: Callable[[], object], device: torch.device) -> dict[str, int]:
    """Syncs, collectives and allocations of one call.

    syncs: on CUDA the operations that `torch.cuda.set_sync_debug_mode` reports, elsewhere reads of
    single values (`.item()`, `float(tensor)`, `if tensor`). collectives: by CommDebugMode.
    allocations: on CUDA the caching allocator's, elsewhere operator results with a storage of
    their own.
    """
    from torch.distributed.tensor.debug import CommDebugMode

    step()  # whatever happens only once has happened
    synchronise(device)
    with CommDebugMode() as communication, warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # its module hooks complain about outputs that are no tensors
        step()
    if device.type == "cuda":
        before = torch.cuda.memory_stats(device)["allocation.all.allocated"]
        with _cuda_syncs() as found:
            step()
        allocations = torch.cuda.memory_stats(device)["allocation.all.allocated"] - before
        syncs = len(found)
    else:
        with _Operations() as operations:
            step()
        syncs, allocations = operations.host_reads, operations.new_tensors
    return {
        "syncs": syncs,
        "collectives": communication.get_total_counts(),
        "allocations": allocations,
    }


@contextlib.contextmanager
def _cuda_syncs() -> Iterator[list[warnings.WarningMessage]]:
    previous = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as all_warnings:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        found: list[warnings.WarningMessage] = []
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(previous)
            found += [w for w in all_warnings if "synchroniz" in str(w.message)]


def peak_memory(step: Callable[[], object], device: torch.device) -> int | None:
    """Bytes allocated at most during one call on a GPU; None on a CPU, which keeps no such count."""
    if device.type != "cuda":
        return None
    synchronise(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    synchronise(device)
    return torch.cuda.max_memory_allocated(device)


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
    print(json.dumps(_rounded(line)), flush=True)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value
