"""Which commit a result is of."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path


def short_commit(root: Path, sources: Iterable[str]) -> str:
    """The short commit of a checkout, with a plus sign if `sources`, paths below `root`, were changed since.

    "unknown" without a repository, as in a tree from an archive.
    """

    def git(command: str, *paths: str) -> str:
        words = ["git", "-C", str(root), *command.split(), *paths]
        return subprocess.check_output(words, text=True).strip()

    if not (root / ".git").exists():
        return "unknown"
    changed = git("status --porcelain --", *sources)
    return git("rev-parse --short HEAD") + "+" * bool(changed)
