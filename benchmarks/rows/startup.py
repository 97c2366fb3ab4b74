"""How long commands take to start, next to a process that only imports torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import ROOT
from benchmarks.rows import Row, Setting


class Commands(NamedTuple):
    """Case: a job file that is rejected."""

    rejected: Path


def commands(setting: Setting) -> Commands:
    path = setting.folder / "rejected.toml"
    text = (ROOT / "apps/train/configs/debug.toml").read_text()
    path.write_text(text.replace("num_heads = 4", "num_heads = 7"))
    return Commands(path)


def process(*arguments: str, code: int = 0) -> Callable[[], None]:
    """A Python process from source; it must end with `code`."""
    found = os.pathsep.join(str(path) for path in sorted(ROOT.glob("*/*/src")))
    environment = {**os.environ, "PYTHONPATH": found}

    def step() -> None:
        done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True)
        if done.returncode != code:
            raise RuntimeError(f"{arguments}: exit {done.returncode}, {done.stderr[-300:]!r}")

    return step


def import_torch(case: Commands) -> Callable[[], None]:
    return process("-c", "import torch")


def help_text(case: Commands) -> Callable[[], None]:
    return process("-m", "forge_train", "--help")


def rejected_file(case: Commands) -> Callable[[], None]:
    return process("-m", "forge_train", "run", str(case.rejected), code=78)


_PLAIN = "each in a new process, from source; import torch is a process that does only that"
ROWS = [
    Row("startup-help", commands, {"forge": help_text, "import_torch": import_torch}, _PLAIN),
    Row("startup-rejected", commands, {"forge": rejected_file, "import_torch": import_torch},
        _PLAIN + "; the file has a broken rule, and forge-train run ends with exit code 78; the bound allows 0.3 s", bounds={"import_torch": 0.8}),
]  # fmt: skip
