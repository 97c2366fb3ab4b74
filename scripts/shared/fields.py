"""Fields of a configuration with help and range, and the base class that checks them.

@dataclass(frozen=True)
class EvalConfig(Checked):
    every_steps: int = field(100, "steps between evaluations; 0: never", (0, 10**9))
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

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
    """Base of frozen dataclasses: a ValueError lists values of a wrong type or out of range, and the problems of `_problems`."""

    def __post_init__(self) -> None:
        raise_problems("", [*type_problems(self), *range_problems(self), *self._problems()])

    def _problems(self) -> Iterable[Problem]:
        return ()


def type_problems(config: Any) -> Iterator[Problem]:
    """A problem for each value that the Literal of its field does not have, and for one text in place of a list."""
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if isinstance(value, str) and str(item.type).startswith("tuple["):
            yield Problem(item.name, "type", value, "must be a list of texts", f"use [{value!r}]")

    fields = [item.name for item in dataclasses.fields(config) if "Literal[" in str(item.type)]
    hints = get_type_hints(type(config)) if fields else {}
    for name in fields:
        hint, value = hints[name], getattr(config, name)
        options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        if all(get_origin(o) is Literal or o is NoneType for o in options):
            choices = [choice for option in options for choice in get_args(option) or [None]]
            if value not in choices:
                rule = f"must be one of {str(choices)[1:-1]}"
                yield Problem(name.removesuffix("_"), "unknown", value, rule, f"use {choices[0]!r}")


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
