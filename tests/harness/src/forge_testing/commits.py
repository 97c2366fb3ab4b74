"""Which commit a result is of."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path


def short_commit(root: Path, sources: Iterable[str]) -> str:
    """The short commit of a checkout, with a plus sign if `sources`, paths below `root`, were changed since.

    "unknown" without a repository, as in a tree from an archive.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    if not (root / ".git").exists():
        return "unknown"
    changed = git("status", "--porcelain", "--", *sources)
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
