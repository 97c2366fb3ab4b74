"""Assert which value is rejected, and by which rule, without a word of the message."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

ANY = object()


@contextlib.contextmanager
def rejects(
    key: str, value: Any = ANY, code: str | None = None, kind: type[Exception] = ValueError
) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Expect a `kind` one of whose problems has this key, value and code.

        with rejects("top_k", 9, "above_experts"):
            MoEConfig(dim=8, hidden_dim=8, num_experts=4, top_k=9)

    Give the code where the key has several rules. `value` is compared by repr, so that NaN equals NaN and 1 is not True.
    """
    with pytest.raises(kind) as caught:
        yield caught
    problems = getattr(caught.value, "problems", ())
    assert problems, f"{type(caught.value).__name__} without problems: {caught.value}"
    found = [(p.key, p.code, repr(p.value)) for p in problems]
    wanted = [
        row
        for row in found
        if row[0] == key and code in (None, row[1]) and (value is ANY or row[2] == repr(value))
    ]
    assert wanted, f"no problem of {key} ({code}, {value!r}) among {found}"
