"""Checks of configuration dataclasses."""

import math
from collections.abc import Collection, Iterator, Mapping
from numbers import Integral, Real
from typing import Any

from forge_core._shared.problems import Problem


def foreign_keys(
    config: Any, readers: Mapping[str, tuple[str, ...]], names: Collection[str]
) -> Iterator[Problem]:
    """Problems of keys off their defaults that the built-in part of `config.name` does not read.

    readers: the names that read each key; a part that is not among the built-in `names` may read all.
    """
    for key, whose in readers.items() if config.name in names else ():
        value = getattr(config, key)
        # a default stands in every configuration that was ever written, so it passes under any name
        if config.name not in whose and value != getattr(type(config), key):
            yield foreign(config.name, key, value, whose)


def foreign(name: str, key: str, value: Any, whose: tuple[str, ...]) -> Problem:
    """The problem of a key that only the names `whose` read, where `name` is set."""
    rule = f"is a key of name {' and '.join(map(repr, whose))}, and name is {name!r}"
    return Problem(key, "foreign", value, rule, f"remove it, or use {whose[0]}")


def foreign_table(config: Any, table: str, name: str) -> Iterator[Problem]:
    """Problems of keys off their defaults of the `table` that belongs to `name`, under another `config.name`."""
    own = getattr(config, table)
    for key, value in vars(own).items():
        if config.name != name and value != getattr(type(own), key):
            yield foreign(config.name, f"{table}.{key}", value, (name,))


def is_finite(value: object) -> bool:
    """Whether `value` is a number, neither NaN nor infinite."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def is_size(value: object, most: int) -> bool:
    """Whether `value` is a whole number from 1 to `most`."""
    return isinstance(value, Integral) and not isinstance(value, bool) and 1 <= int(value) <= most


def size_problems(config: object, sizes: dict[str, int]) -> Iterator[Problem]:
    """Problems of fields that are not integers from 1 to a maximum; None is allowed where it is the default."""
    for name, most in sizes.items():
        value = getattr(config, name)
        optional = getattr(type(config), name, 0) is None
        if not is_size(value, most) and not (optional and value is None):
            rule = f"must be a whole number, at least 1 and at most {most}"
            yield Problem(name, "range", value, rule, "give one in that range")


def switch_problems(config: object, *names: str) -> Iterator[Problem]:
    """Problems of fields that are not true or false."""
    for name in names:
        value, default = getattr(config, name), getattr(type(config), name)
        if not isinstance(value, bool):
            yield Problem(name, "type", value, "must be true or false", f"use {default}".lower())


def choice_problems(config: object, name: str, choices: tuple[str, ...]) -> Iterator[Problem]:
    """The problem of a field that is not one of its choices."""
    value, default = getattr(config, name), getattr(type(config), name)
    if value not in choices:
        rule = f"must be {' or '.join(map(repr, choices))}"
        yield Problem(name, "unknown", value, rule, f"use {default!r}")
