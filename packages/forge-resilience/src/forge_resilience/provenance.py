"""How a run was made: versions, machine, and the state of the source tree."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forge_resilience._shared.atomic import write_file

__all__ = [
    "describe_environment", "git_state", "node_name", "record_environment", "recorded_hosts",
]  # fmt: skip

_ENVIRONMENT, _PATCH = "environment.json", "git.patch"


def describe_environment(distributions: Sequence[str]) -> dict[str, Any]:
    """Return Python, platform, host, command line, torch's threads, and the versions of `distributions`.

    A version is None if the package runs from its sources without being installed.
    """
    import torch

    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "command": sys.argv,
        "threads": torch.get_num_threads(),
        "versions": {name: _version(name) for name in distributions},
    }


def record_environment(folder: Path, distributions: Sequence[str], hosts: Sequence[str]) -> None:
    """Write environment.json into a folder, and git.patch, the diff of a dirty tree; each is replaced in one step.

    `hosts` are the machines of all ranks. Raises OSError.
    """
    git = git_state()
    patch = git.pop("patch", "")
    environment = {**describe_environment(distributions), "hosts": list(hosts), "git": git}
    write_file(folder / _ENVIRONMENT, json.dumps(environment, indent=2) + "\n")
    if patch:
        write_file(folder / _PATCH, patch)
    else:
        (folder / _PATCH).unlink(missing_ok=True)


def recorded_hosts(folder: Path) -> list[str] | None:
    """The machines of all ranks that `record_environment` wrote; None if it is missing or damaged."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        hosts = json.loads((folder / _ENVIRONMENT).read_text())["hosts"]
        return hosts if isinstance(hosts, list) else None
    return None


def node_name() -> str:
    """The name of this machine as its scheduler knows it: SLURMD_NODENAME, else the host name."""
    return os.environ.get("SLURMD_NODENAME") or platform.node()


def git_state() -> dict[str, Any]:
    """`commit`, `dirty` and `patch` (the diff) of the working directory; empty outside of a checkout.

    Starts git twice, at most 5 s each.
    """
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return {}
    patch = _git("diff", "HEAD") or ""
    return {"commit": commit.strip(), "dirty": bool(patch), "patch": patch}


def _version(distribution: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(distribution)
    return None


def _git(*args: str) -> str | None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(["git", *args], capture_output=True, timeout=5, check=True)
        return done.stdout.decode(errors="replace")
    return None
