"""Problems of arguments: sentences of value, rule and fix, collected and raised as one error."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


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


def byte_eos_problem(eos: str | None) -> Iterator[str]:
    """The problem of an end token beside the byte tokenizer."""
    if eos is not None:
        yield f"eos {eos!r} means nothing to the byte tokenizer, which has its own; remove it"


def every_problem(every: Any) -> Iterator[str]:
    """The problem of a number of documents of which one is held out."""
    if type(every) is not int or every < 0 or every == 1:
        yield f"validation_every {every!r:.40} must be 0 (none) or at least 2; use 20 for 5 %"
