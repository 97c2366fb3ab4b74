# Copied from scripts/shared/toml_files.py; edit that file, then run scripts/copy_shared.py.
"""TOML and other text files of bounded size and depth, as one text or table.

table = read_toml("job.toml")
dict(flatten(table))["train.steps"]
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .paths import open_regular
from .problems import ProblemError, invalid

MAX_BYTES = 2**20
MAX_DEPTH = 16
#: A dotted name with more names than a table may be deep, in a text whose strings are empty. tomllib would need
#: hours for thousands of names, so it must not see them.
_LONG_NAME = re.compile(rf'(?<![\w.-])(?:(?:[\w-]+|"")[ \t]*\.[ \t]*){{{MAX_DEPTH}}}')
#: Strings, quoted names and comments, which may have any number of dots. None of them backtracks (`*+`) or needs an end,
#: so the search is linear in any text; tomllib rejects a string without an end.
_STRING_OR_COMMENT = re.compile(
    r'"""(?:[^"\\]|\\.|"(?!""))*+(?:""")?'
    r"|'''(?:[^']|'(?!''))*+(?:''')?"
    r'|"(?:[^"\\\n]|\\.)*+"?'
    r"|'[^'\n]*+'?"
    r"|#[^\n]*+",
    re.DOTALL,
)


def read_text(path: str | Path, max_bytes: int = MAX_BYTES) -> str:
    """The text of a regular file of at most `max_bytes` bytes of UTF-8; never waits for a pipe or device.

    Raises ValueError without the path: the caller adds it with the role of the file.
    """
    try:
        descriptor, _ = open_regular(path)
    except ProblemError as error:
        raise ProblemError(error.problems) from None
    except OSError as error:
        raise invalid("", "not_found", ..., f"{error.strerror}", "name an existing file") from error
    except ValueError as error:  # NUL, or half a surrogate pair
        rule = "is not a path, as it holds NUL or a lone surrogate"
        raise invalid("", "file_name", ..., rule, "name an existing file") from error

    with open(descriptor, "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        rule, fix = f"has more than {max_bytes} bytes", "name the right file, or make it shorter"
        raise invalid("", "length", ..., rule, fix)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        rule = f"is not text: byte {error.start} is not UTF-8"
        raise invalid("", "not_utf8", ..., rule, "save it as UTF-8") from error


def read_toml(path: str | Path) -> dict[str, Any]:
    """The table of a TOML file. Raises ValueError as `read_text` does; cost: one read, linear parsing."""
    text = read_text(path)
    if _LONG_NAME.search(_STRING_OR_COMMENT.sub('""', text)):
        rule = f"has a key with more than {MAX_DEPTH} names"
        raise invalid("", "parts", ..., rule, "write fewer dots")
    try:
        table: dict[str, Any] | None = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        rule = f"is not valid TOML: {error}"
        raise invalid("", "not_toml", ..., rule, "correct that line") from error
    except ValueError as error:  # int() of more than 4300 digits
        rule = "holds a number of thousands of digits"
        raise invalid("", "digits", ..., rule, "write a shorter one") from error
    except RecursionError:
        table = None

    if table is None or _is_deep(table):
        rule = f"is nested deeper than {MAX_DEPTH} levels"
        raise invalid("", "depth", ..., rule, "write it flat")
    return table


def flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of each leaf; an empty table is a leaf, so that it can be reported."""
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _is_deep(table: Any) -> bool:
    """Whether values are more than MAX_DEPTH tables or lists deep; level by level, as recursion has a limit."""
    level = [table]
    for _ in range(MAX_DEPTH):
        inner = (
            v.values() if isinstance(v, dict) else v for v in level if isinstance(v, dict | list)
        )
        level = [value for values in inner for value in values]
    return bool(level)
