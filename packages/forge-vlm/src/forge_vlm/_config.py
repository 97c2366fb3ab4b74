"""Checks of configuration dataclasses."""

import math
from collections.abc import Iterator
from numbers import Integral, Real
from typing import Any

from forge_vlm._shared.problems import Problem


def foreign_table(config: Any, table: str, name: str) -> Iterator[Problem]:
    """Problems of keys off their defaults of the `table` that belongs to `name`, under another `config.name`."""
    own = getattr(config, table)
    defaults = vars(type(own)())
    for key, value in vars(own).items():
        if config.name != name and value != defaults[key]:
            rule = f"is a key of name {name!r}, and name is {config.name!r}"
            yield Problem(f"{table}.{key}", "foreign", value, rule, "remove one")


def is_finite(value: object) -> bool:
    """Whether `value` is a number, neither NaN nor infinite."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def is_size(value: object, most: int) -> bool:
    """Whether `value` is a integer from 1 to `most`."""
    return isinstance(value, Integral) and not isinstance(value, bool) and 1 <= int(value) <= most


def size_problems(config: object, sizes: dict[str, int]) -> Iterator[Problem]:
    """Problems of fields that are not integers from 1 to a maximum; None is allowed where it is the default."""
    for name, most in sizes.items():
        value = getattr(config, name)
        optional = getattr(type(config), name, 0) is None
        if not is_size(value, most) and not (optional and value is None):
            rule = f"must be a whole number from 1 to {most}"
            yield Problem(name, "size", value, rule, "use one")
