"""What a rank asks of its device and of the others while a function runs: kernels, products, copies, collectives.

Collectives are counted where torch hands them to a backend, so that gloo and NCCL can be compared; compiled code and
backward passes included. The rest is counted by the null GPU, and is nothing on CPUs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.null_gpu.device import counted
from torch.autograd.profiler import profile

from forge_testing import device

# Waits and allocations depend on what ran before in the process.
_DEVICE = ("launch", "launch.triton", "blas", "copy.host_to_device", "copy.device_to_host")


def count(function: Callable[[], Any]) -> Counter[str]:
    """Calls of one run of `function` on this rank, by kind: `c10d.allreduce_`, `launch`, ..."""
    before = _of_the_device()
    with profile() as seen:
        function()
    found = _of_the_device()
    found.subtract(before)
    assert seen.kineto_results is not None
    for event in seen.kineto_results.events():  # raw: the events of Python take seconds to make
        if event.name().startswith("c10d::"):
            found[event.name().replace("::", ".")] += 1
    return +found


def _of_the_device() -> Counter[str]:
    if device().type == "cpu":
        return Counter()
    totals = counted()
    return Counter({kind: totals[kind] for kind in _DEVICE})
