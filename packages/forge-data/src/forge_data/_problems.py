"""Problems of arguments that several modules check."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forge_data._shared.problems import Problem


def path_problems(path: str | Path, key: str = "path") -> Iterator[Problem]:
    """Problems of a path that no file can have, found before anything is opened."""
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError:
        encoded = b"\0"
    if b"\0" in encoded:
        rule = "must be a file name, without NUL or lone surrogates"
        yield Problem(key, "file_name", str(path), rule, "correct it")


def special_problems(tokenizer: str, eos: str | None, bos: str | None) -> Iterator[Problem]:
    """Problems of the tokens that begin and end documents."""
    for key, value in (("eos", eos), ("bos", bos)):
        if value is not None and tokenizer == "byte":
            rule = "must not be given with the byte tokenizer, which has an end and no begin token"
            yield Problem(key, "excludes", value, rule, "remove it")


def every_problems(every: Any) -> Iterator[Problem]:
    """The problem of a number of documents of which one is held out."""
    if type(every) is not int or every < 0 or every == 1:
        rule = "must be 0 (none) or at least 2"
        yield Problem("validation_every", "range", every, rule, "use 20 for 5 %")
