# Copied from scripts/shared/fields.py; edit that file, then run scripts/copy_shared.py.
"""Fields of a configuration with help and range, and the base class that checks them.

@dataclass(frozen=True)
class EvalConfig(Checked):
    every_steps: int = field(100, "steps between evaluations; 0: never", (0, 10**9))
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from .problems import Problem, raise_problems


def field(
    default: Any, help: str = "", between: tuple[float, float] | None = None, **metadata: Any
) -> Any:
    """A field of a dataclass; a `default` that can be called makes the value. A `dict` does not count for the hash.

    help: what it means, where the text below the field does not say it.
    between: the least and the largest value. The largest is above every real one, so a larger value is a typing error.
    With `positive=True` 0 is not allowed. Other metadata is as given.
    """
    metadata |= {"help": help, "between": between}
    if callable(default):
        hashed = False if default is dict else None
        return dataclasses.field(default_factory=default, hash=hashed, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


class Checked:
    """Base of frozen dataclasses: a ValueError lists values out of range and the problems of `_problems`."""

    def __post_init__(self) -> None:
        raise_problems("", [*range_problems(self), *self._problems()])

    def _problems(self) -> Iterable[Problem]:
        return ()


def range_problems(config: Any) -> Iterator[Problem]:
    """A problem for each field whose value is not in its range; None is in every range."""
    for item in dataclasses.fields(config):
        between, value = item.metadata.get("between"), getattr(config, item.name)
        if between is None or value is None:
            continue
        (low, high), positive = between, item.metadata.get("positive", False)
        if not low <= value <= high or (positive and not value):
            least = "above 0" if positive else f"at least {low}"
            rule = f"must be {least}" + (f" and at most {high}" if high < float("inf") else "")
            fix = "use fewer zeros" if value > high else ""
            yield Problem(item.name.removesuffix("_"), "range", value, rule, fix)
