"""The shared topic `limits`, by the copy of one package; `check` compares the bytes of the others."""

from __future__ import annotations

import errno
import resource

import pytest

from forge_train._shared.limits import limit_problem
from forge_train._shared.problems import invalid
from forge_train.errors import ConfigError, DataError, of_limit, report_of
from forge_train.loop.vote import fault_code

pytestmark = pytest.mark.lane("test")


@pytest.mark.parametrize(
    ("error", "key"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "RLIMIT_NOFILE"),
        (OSError(errno.ENFILE, "Too many open files in system", "a"), "fs.file-max"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "RLIMIT_AS"),
        (MemoryError(), "RLIMIT_AS"),
        (RuntimeError("can't start new thread"), "RLIMIT_NPROC"),  # prose: of Python
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "RLIMIT_AS"),
    ],
)
def test_F192_the_limit_is_named_wherever_it_was_met(error: BaseException, key: str) -> None:
    for kind in (DataError, ConfigError):
        try:
            raise invalid("path", "not_found", "a", "is unreadable", kind=kind) from error
        except kind as raised:
            found, report = of_limit(raised), report_of(raised)
        assert [(p.key, p.code) for p in found.problems] == [(key, "limit")]
        assert (found.exit_code, report[0]) == (1, 1)  # as other ranks hear of it
    assert fault_code(error if isinstance(error, Exception) else None) == 1


def test_F192_the_value_is_that_of_the_limit_where_there_is_one() -> None:
    problem = limit_problem(OSError(errno.EMFILE, ""))
    assert problem is not None
    assert problem.value == resource.getrlimit(resource.RLIMIT_NOFILE)[0]


@pytest.mark.parametrize(
    "error", [None, OSError(errno.ENOENT, ""), OSError(errno.EAGAIN, ""), ValueError("a")]
)
def test_other_errors_are_of_no_limit(error: BaseException | None) -> None:
    assert limit_problem(error) is None
