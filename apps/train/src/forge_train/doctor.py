"""Abilities of this machine, on one screen; every probe computes or writes something, none assumes a GPU."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from forge_resilience.health import (
    BROKEN,
    OK,
    WARN,
    Finding,
    NvmlProbe,
    disk,
    known_answer,
    loopback,
    memory_patterns,
    shared_memory,
)

MISSING = "missing"
_EXIT = {OK: 0, WARN: 1, MISSING: 1, BROKEN: 2}
_OPTIONAL = {
    "tensorboard": ("TensorBoard files", "pip install 'forge-train[track]'"),
    "tokenizers": ("tokenizer JSON files", "pip install 'forge-train[tokenizers]'"),
}
_PACKAGES = (
    "forge_core",
    "forge_parallel",
    "forge_moe",
    "forge_data",
    "forge_ckpt",
    "forge_resilience",
    "forge_vlm",
)


def examine(as_json: bool = False, required: Iterable[Finding] = ()) -> int:
    """Print the findings, and those that were `required`; 0 when all is well, 1 when something is missing or amiss,
    2 when runs cannot work."""
    findings = [*_findings(), *required]
    code = max(_EXIT[f.state] for f in findings)
    if as_json:
        rows = [
            {"what": f.what, "state": f.state, "detail": f.detail, "fix": f.fix} for f in findings
        ]
        print(json.dumps({"ready": code == 0, "exit_code": code, "findings": rows}))
        return code
    table = Table("what", "state", "detail", "what to do")
    colors = {OK: "green", WARN: "yellow", MISSING: "yellow", BROKEN: "red"}
    for f in findings:
        state = f"[{colors[f.state]}]{f.state}[/]"
        table.add_row(f.what, state, escape(f.detail), escape(f.fix))
    console = Console()
    console.print(table)
    console.print(("ready", "ready; something is missing or amiss", "not ready")[code])
    return code


def _findings() -> Iterator[Finding]:
    yield _probe("python", _python)
    yield _probe("torch", _torch)
    for name in _PACKAGES:
        yield _probe(name, lambda name=name: _import(name))  # type: ignore[misc]
    yield _probe("computing", lambda: known_answer("cpu"))
    yield from _accelerator()
    yield _probe("memory", _memory)
    yield _probe("disk", lambda: disk("."))
    yield _probe("shared memory", shared_memory)
    yield _probe("loopback", loopback)
    yield _probe("built-in text", _corpus)
    for module, (use, fix) in _OPTIONAL.items():
        there = importlib.util.find_spec(module) is not None
        yield Finding(module, OK if there else MISSING, use, fix="" if there else fix)


def _probe(what: str, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except Exception as error:
        value = f"{type(error).__name__}: {error}"
        return Finding(what, BROKEN, value, fix="reinstall forge-train")


def _python() -> Finding:
    good = sys.version_info >= (3, 11)
    fix = "" if good else "use Python 3.11 or newer"
    return Finding("python", OK if good else BROKEN, platform.python_version(), fix=fix)


def _torch() -> Finding:
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    good = (2, 11) <= (major, minor) < (2, 16)  # what the tests have seen
    return Finding(
        "torch",
        OK if good else BROKEN,
        torch.__version__,
        fix="" if good else "pip install 'torch>=2.11,<2.16'",
    )


def _import(name: str) -> Finding:
    distribution = {"forge_core": "forge-train-core"}.get(name, name.replace("_", "-"))
    importlib.import_module(name)
    try:
        detail = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        detail = "from source"
    return Finding(name, OK, detail)


def _accelerator() -> Iterator[Finding]:
    if not torch.accelerator.is_available():
        yield Finding("accelerator", OK, "none: runs use the CPU")
        return
    for index in range(torch.accelerator.device_count()):
        current = torch.accelerator.current_accelerator()
        assert current is not None
        device = torch.device(current.type, index)
        yield _probe("computing", lambda device=device: known_answer(device))  # type: ignore[misc]
        yield _probe("device memory", lambda device=device: memory_patterns(device))  # type: ignore[misc]
        driver = NvmlProbe.of(device)
        if driver is not None:
            yield from [driver] if isinstance(driver, Finding) else driver.findings()


def _memory() -> Finding:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    threads = f"{torch.get_num_threads()} of {os.cpu_count()} CPU threads"
    return Finding("memory", OK, f"{total:.0f} GiB, {threads}")


def _corpus() -> Finding:
    from forge_data import SourceConfig, open_source

    source = open_source(SourceConfig())
    return Finding("built-in text", OK, f"{source.num_tokens} tokens")
