"""Problems of arguments: sentences of value, rule and fix, collected and raised as one error."""

import os
from collections.abc import Iterable
from pathlib import Path


def raise_problems(where: str, problems: Iterable[str]) -> None:
    """Raise one ValueError with a line `where: problem` for each problem; do nothing without any."""
    lines = [f"{where}: {problem}" for problem in problems]
    if lines:
        raise ValueError("\n".join(lines))


def path_problems(path: str | Path) -> list[str]:
    """Problems of a path that no file can have, found before anything is opened."""
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError:
        encoded = b"\0"
    if b"\0" in encoded:
        return [
            f"path {str(path)[:80]!r} must be a file name, without NUL or lone surrogates; correct it"
        ]
    return []
