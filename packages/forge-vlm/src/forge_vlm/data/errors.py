"""Errors of multimodal data."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

from forge_vlm._shared import problems

__all__ = ["InvalidSample", "invalid", "readable"]


class InvalidSample(problems.WithProblems, ValueError):
    """A sample, a picture or a file that cannot be read; `where` names it."""


#: The InvalidSample of one problem, or, with `kind`, another error.
invalid = partial(problems.invalid, kind=InvalidSample)


@contextlib.contextmanager
def readable(path: object) -> Iterator[None]:
    """Errors of the file system as InvalidSample with the name of the file, or `path`."""
    try:
        yield
    except OSError as error:
        rule, where = f"cannot be read ({error.strerror})", error.filename or path
        fix = "check the path and its permissions"
        raise invalid("", "unreadable", ..., rule, fix, where=where) from error
