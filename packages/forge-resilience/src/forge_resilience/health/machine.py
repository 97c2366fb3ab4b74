"""Findings about this machine that need no job and no other rank: versions, packages, devices, memory, disk, network.

Importing this costs no torch.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from forge_resilience.health import probes
from forge_resilience.health.nvml import NvmlProbe, driver_findings
from forge_resilience.health.probes import BROKEN, MISSING, OK, Finding

__all__ = ["accelerator_count", "accelerator_findings", "machine_findings", "optional", "probe"]

_TORCH = ((2, 11), (2, 16))  # what the tests have seen: from the first, below the second


def machine_findings(distributions: Mapping[str, str], fix: str) -> Iterator[Finding]:
    """Yield findings about versions, packages, devices, memory, disk and network.

    Cost: some seconds, and up to 512 MiB of each accelerator.

    distributions: packages that must be importable, and the distributions that have them. fix: what to do about a probe that
    fails in another way than it foresees, such as "reinstall my-trainer".
    """
    checks: dict[str, Callable[[], Finding]] = {"python": _python, "torch": _torch}
    checks |= {name: partial(_package, name, own) for name, own in distributions.items()}
    checks["computing"] = partial(probes.known_answer, "cpu")
    yield from (probe(what, check, fix) for what, check in checks.items())

    yield from accelerator_findings(fix)
    checks = {"memory": _memory, "disk": partial(probes.disk, ".")}
    checks |= {"shared memory": probes.shared_memory, "loopback": probes.loopback}
    yield from (probe(what, check, fix) for what, check in checks.items())


def probe(what: str, check: Callable[[], Finding], fix: str) -> Finding:
    """Run a check; its exception becomes a broken finding."""
    try:
        return check()
    except Exception as error:
        return Finding(what, BROKEN, f"{type(error).__name__}: {error}", fix=fix)


def optional(module: str, use: str, fix: str) -> Finding:
    """Check that a module that one `use` needs is installed."""
    there = importlib.util.find_spec(module) is not None
    return Finding(module, OK if there else MISSING, use, fix="" if there else fix)


def accelerator_count() -> Finding:
    """Check that there is an accelerator; `accelerator_findings` probe it."""
    import torch

    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if count:
        return Finding("gpu", OK, f"{count} here")
    return Finding("gpu", MISSING, "none here", fix="run this on a node with one: srun ...")


def accelerator_findings(fix: str) -> Iterator[Finding]:
    """Yield the probes of each accelerator, and the counters of its driver."""
    import torch

    if not torch.accelerator.is_available():
        yield Finding("accelerator", OK, "none: runs use the CPU")
        return
    current = torch.accelerator.current_accelerator()
    assert current is not None
    for index in range(torch.accelerator.device_count()):
        device = torch.device(current.type, index)
        yield probe("computing", partial(probes.known_answer, device), fix)
        yield probe("device memory", partial(probes.memory_patterns, device), fix)
        yield from driver_findings(NvmlProbe.of(device))


def _python() -> Finding:
    good = sys.version_info >= (3, 11)
    fix = "" if good else "use Python 3.11 or newer"
    return Finding("python", OK if good else BROKEN, platform.python_version(), fix=fix)


def _torch() -> Finding:
    import torch

    if _TORCH[0] <= tuple(map(int, torch.__version__.split(".")[:2])) < _TORCH[1]:
        return Finding("torch", OK, torch.__version__)
    (_, least), (_, most) = _TORCH
    fix = f"pip install 'torch>=2.{least},<2.{most}'"
    return Finding("torch", BROKEN, torch.__version__, fix=fix)


def _package(name: str, distribution: str) -> Finding:
    importlib.import_module(name)
    try:
        return Finding(name, OK, importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, OK, "from source")


def _memory() -> Finding:
    import torch

    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    threads = f"{torch.get_num_threads()} of {os.cpu_count()} CPU threads"
    return Finding("memory", OK, f"{total:.0f} GiB, {threads}")
