# Copied from scripts/shared/jsonl.py; edit that file, then run scripts/copy_shared.py.
"""JSON that users wrote, where a mistake is an error that names the line, and logs of our own, where a torn line is left out.

record = parse(line, f"{path} line {number}", InvalidData)
for event in read_log(folder / "events.jsonl"): ...
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterator
from typing import Any

from .paths import open_regular
from .problems import ProblemError, WithProblems, invalid


def parse(
    content: bytes | str, where: object, kind: type[WithProblems] = ProblemError, fix: str = ""
) -> Any:
    """The value of a JSON text. Raises `kind` with the code encoding (not UTF-8), depth or not_json."""
    try:
        # json.loads of bytes guesses UTF-16 and UTF-32 too
        return json.loads(content if isinstance(content, str) else content.decode("utf-8-sig"))
    except UnicodeDecodeError:
        rule, code, fix = "must be UTF-8", "encoding", "convert the file, for example with iconv"
    except RecursionError:
        rule, code = "must be JSON of a few levels, not nested deep", "depth"
    except ValueError as error:  # no JSON, or an integer of thousands of digits
        rule, code = f"must be JSON ({error})", "not_json"
    raise invalid("", code, ..., rule, fix or "correct it", where=where, kind=kind)


def read_log(path: str | os.PathLike[str]) -> Iterator[Any]:
    """The values of a log of JSON lines; lines that a kill tore are left out, a missing file has none.

    Memory: a line. The file is open until the last one was read. A FIFO or device is a ValueError, as `open_regular` says.
    """
    return (value for value, _ in read_log_from(path, 0))


def read_log_from(path: str | os.PathLike[str], offset: int) -> Iterator[tuple[Any, int]]:
    """The values of a log from a byte on, each with the offset after its line, from which a later call goes on."""
    with contextlib.suppress(FileNotFoundError), open(open_regular(path)[0], "rb") as file:
        file.seek(offset)
        for line in file:
            offset += len(line)
            with contextlib.suppress(ValueError, RecursionError):
                yield json.loads(line.decode(errors="replace")), offset
            if not line.endswith(b"\n"):
                return  # torn, or its writer has not written the rest yet


def append_line(path: str | os.PathLike[str], value: Any) -> None:
    """Append a value to a log of several writers, with one `os.write`: lines do not mix, and a kill tears the last at most.

    A torn line of an earlier writer is ended first. Raises OSError where the line cannot be written in full, and for what is
    not a regular file: the open of a FIFO would block for ever.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o644)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))

        data = (json.dumps(value, default=str, allow_nan=False) + "\n").encode()
        if status.st_size and os.pread(descriptor, 1, status.st_size - 1) != b"\n":
            data = b"\n" + data
        written = os.write(descriptor, data)
        if written < len(data):
            raise OSError(
                errno.ENOSPC, f"{written} of {len(data)} bytes were written", os.fspath(path)
            )
    finally:
        os.close(descriptor)
