# Copied from scripts/shared/limits.py; edit that file, then run scripts/copy_shared.py.
"""Errors of a limit of the process or the machine, which say nothing about the file that was being read.

problem = limit_problem(error)      # RLIMIT_NOFILE 12 is used up (Too many open files); raise it (ulimit -n)
"""

from __future__ import annotations

import dataclasses
import errno
import os
import resource
from typing import Any

from .problems import Problem, problems_of

_LIMITS = {
    errno.EMFILE: ("RLIMIT_NOFILE", resource.RLIMIT_NOFILE, "raise it (ulimit -n)"),
    errno.ENFILE: ("fs.file-max", None, "close files of the machine, or raise it (sysctl)"),
    errno.ENOMEM: ("RLIMIT_AS", resource.RLIMIT_AS, "raise it (ulimit -v), or free memory"),
    errno.EAGAIN: ("RLIMIT_NPROC", resource.RLIMIT_NPROC, "raise it (ulimit -u)"),
}


def limit_problem(error: BaseException | None) -> Problem | None:
    """The limit that caused an error, or one of the errors that it followed; None if none did."""
    while error is not None:
        # EAGAIN of a file is a lock that another holds
        number = None if isinstance(error, BlockingIOError) else getattr(error, "errno", None)
        # Python and torch have no class for these
        if isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error):
            number = errno.ENOMEM
        elif isinstance(error, RuntimeError) and "can't start new thread" in str(error):
            limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
            number = errno.ENOMEM if limited else errno.EAGAIN
        if number in _LIMITS:
            key, limit, fix = _LIMITS[number]
            value = ... if limit is None else resource.getrlimit(limit)[0]
            known = ... if value == resource.RLIM_INFINITY else value
            return Problem(key, "limit", known, f"is used up ({os.strerror(number)})", fix)
        error = error.__cause__ or error.__context__
    return None


def problems_under(error: BaseException, table: str) -> list[Any]:
    """The problems of an error with their keys below a table; a file that its text names is their origin.

    Raises the error itself if a limit of memory or descriptors caused it.
    """
    if limit_problem(error):
        raise error
    where = str(getattr(error, "where", ""))
    origin = "" if where.isidentifier() else where  # the name of a component, or a file
    if not getattr(error, "problems", ()):
        return [
            Problem(table, "error", ..., f"cannot be used: {p.rule}") for p in problems_of(error)
        ]
    return [dataclasses.replace(p.under(table), origin=p.origin or origin) for p in problems_of(error)]  # fmt: skip
