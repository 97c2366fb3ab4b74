"""Let another thread run at the worst moment, without a thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def interleave(target: Any, other: Callable[[], object]) -> None:
    """Call `other` once, right after the next attribute of `target` that is set.

    A thread may be switched there: what `target` keeps in attributes between calls is then that of `other`.
    """
    kind: Any = type(target)
    waiting = [other]

    class Interleaved(kind):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if waiting:
                waiting.pop()()

    target.__class__ = Interleaved
