"""Abilities of this machine, on one screen; every probe computes or writes something, none assumes a GPU."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

OK, MISSING, BROKEN = "ok", "missing", "broken"
_EXIT = {OK: 0, MISSING: 1, BROKEN: 2}
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
)


class Finding(NamedTuple):
    what: str
    state: str
    detail: str
    fix: str = ""


def examine(as_json: bool = False) -> int:
    """Print the findings; 0 when all is there, 1 when an extra is missing, 2 when runs cannot work."""
    findings = list(_findings())
    code = max(_EXIT[f.state] for f in findings)
    if as_json:
        rows = [f._asdict() for f in findings]
        print(json.dumps({"ready": code == 0, "exit_code": code, "findings": rows}))
        return code
    table = Table("what", "state", "detail", "what to do")
    colours = {OK: "green", MISSING: "yellow", BROKEN: "red"}
    for f in findings:
        state = f"[{colours[f.state]}]{f.state}[/]"
        table.add_row(f.what, state, escape(f.detail), escape(f.fix))
    console = Console()
    console.print(table)
    console.print(("ready", "ready; some extras are missing", "not ready")[code])
    return code


def _findings() -> Iterator[Finding]:
    yield _probe("python", _python)
    yield _probe("torch", _torch)
    for name in _PACKAGES:
        yield _probe(name, lambda name=name: _import(name))  # type: ignore[misc]
    yield _probe("computing", _compute)
    yield _probe("accelerator", _accelerator)
    yield _probe("memory", _memory)
    yield _probe("working folder", _folder)
    yield _probe("built-in text", _corpus)
    for module, (use, fix) in _OPTIONAL.items():
        there = importlib.util.find_spec(module) is not None
        yield Finding(module, OK if there else MISSING, use, "" if there else fix)


def _probe(what: str, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except Exception as error:
        return Finding(what, BROKEN, f"{type(error).__name__}: {error}", "reinstall forge-train")


def _python() -> Finding:
    good = sys.version_info >= (3, 11)
    fix = "" if good else "use Python 3.11 or newer"
    return Finding("python", OK if good else BROKEN, platform.python_version(), fix)


def _torch() -> Finding:
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    good = (2, 11) <= (major, minor) < (2, 14)  # what the tests have seen
    return Finding(
        "torch",
        OK if good else BROKEN,
        torch.__version__,
        "" if good else "pip install 'torch>=2.11,<2.14'",
    )


def _import(name: str) -> Finding:
    distribution = {"forge_core": "forge-train-core"}.get(name, name.replace("_", "-"))
    importlib.import_module(name)
    try:
        detail = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        detail = "from source"
    return Finding(name, OK, detail)


def _compute() -> Finding:
    if not _computes("cpu"):
        return Finding("computing", BROKEN, "a wrong sum on the CPU", "reinstall torch")
    return Finding("computing", OK, f"{torch.get_num_threads()} of {os.cpu_count()} CPU threads")


def _computes(device: torch.device | str) -> bool:
    a = torch.ones(64, 64, device=device)
    return float((a @ a).sum()) == 64**3


def _accelerator() -> Finding:
    if not torch.accelerator.is_available():
        return Finding("accelerator", OK, "none: runs use the CPU")
    device = torch.accelerator.current_accelerator()
    assert device is not None
    count = torch.accelerator.device_count()
    name = torch.cuda.get_device_name(0) if device.type == "cuda" else device.type
    if not _computes(device):
        fix = "look at its driver, or hide it: CUDA_VISIBLE_DEVICES= runs on the CPU"
        return Finding("accelerator", BROKEN, f"{count} x {name}: a wrong sum", fix)
    return Finding("accelerator", OK, f"{count} x {name}")


def _memory() -> Finding:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return Finding("memory", OK, f"{total:.0f} GiB")


def _folder() -> Finding:
    with tempfile.TemporaryFile(dir="."):
        pass
    free = shutil.disk_usage(".").free / 2**30
    good = free > 1
    fix = "" if good else "free some space: checkpoints need about 12 bytes per parameter"
    return Finding("working folder", OK if good else BROKEN, f"writable, {free:.0f} GiB free", fix)


def _corpus() -> Finding:
    from forge_data import SourceConfig, open_source

    source = open_source(SourceConfig())
    return Finding("built-in text", OK, f"{source.num_tokens} tokens")
