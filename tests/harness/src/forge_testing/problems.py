"""Assert which value is rejected, and by which rule, without a word of the message."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

ANY = object()
#: A file to which each assertion appends a line: package, key and code; tests/mutations/rejections.py reads it.
RECORD = "FORGE_REJECTIONS"


@contextlib.contextmanager
def rejects(
    key: str,
    value: Any = ANY,
    code: str | None = None,
    kind: type[BaseException] = ValueError,
    *,
    where: object = "",
) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Expect a `kind` one of whose problems has this key, value and code.

        with rejects("top_k", 9, "above_experts"):
            MoEConfig(dim=8, hidden_dim=8, num_experts=4, top_k=9)

    Give the code where the key has several rules. `value` is compared by repr, so that NaN equals NaN and 1 is not True;
    `...` is that of a problem that shows no value. `where`, as the name of a file, must stand in the text.
    """
    with pytest.raises(kind) as caught:
        yield caught
    assert_problem(caught.value, key, value, code)
    assert str(where) in str(caught.value)


def assert_problem(
    error: BaseException, key: str, value: Any = ANY, code: str | None = None
) -> None:
    """Assert that one of the problems of an error has this key, value and code."""
    problems = getattr(error, "problems", ())
    assert problems, f"{type(error).__name__} without problems: {error}"
    wanted = [
        p
        for p in problems
        if p.key == key
        and code in (None, p.code)
        and (value is ANY or repr(p.value) == repr(value))
    ]
    assert wanted, f"no problem of {key} ({code}, {value!r}) among {problems}"
    if path := os.environ.get(RECORD):
        with open(path, "a", encoding="utf-8") as file:
            package = type(wanted[0]).__module__.partition(".")[0]
            file.write(json.dumps([package, wanted[0].key, wanted[0].code]) + "\n")
