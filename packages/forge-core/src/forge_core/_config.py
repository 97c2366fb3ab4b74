"""Checks of configuration dataclasses."""

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping
from numbers import Integral, Real
from typing import Any

from forge_core._shared.problems import Problem
from forge_core.registry import Registry, installed


def table_field(help: str) -> Any:
    """A field whose default is an empty dict; it stays out of the hash, as dicts have none."""
    return dataclasses.field(default_factory=dict, hash=False, metadata={"help": help})


def options_field(part: str) -> Any:
    """The field of the options of a part."""
    return table_field(f"keyword arguments of a {part} that is not built in")


def name_problems(config: object, key: str, registry: Registry) -> Iterator[Problem]:
    """The problem of a name that is not built in, not an entry point of the registry and no import path."""
    name, group = getattr(config, key), registry.group
    known = isinstance(name, str) and name and (name in registry.built_in or ":" in name)
    if not known and not (isinstance(name, str) and name and installed(name, group)):
        names = " or ".join(map(repr, registry.built_in))
        fix = f"use {names}, an entry point of {group}, or module:attr"
        yield Problem(key, "unknown", name, "is unknown", fix)


def foreign_keys(
    config: Any, readers: Mapping[str, tuple[str, ...]], names: Collection[str]
) -> Iterator[Problem]:
    """Problems of options that the built-in part `config.name` does not read: other values than the defaults.

    readers: the names that read each key; a name that is not among the built-in `names` may read all.
    """
    for key, read_by in readers.items() if config.name in names else ():
        value = getattr(config, key)
        # a default stands in every configuration that was ever written, so it passes under any name
        if config.name not in read_by and value != getattr(type(config), key):
            yield foreign(config.name, key, value, read_by)


def foreign(name: str, key: str, value: Any, whose: tuple[str, ...]) -> Problem:
    """The problem of an option that only the parts `whose` read, where the part is `name`."""
    rule = f"is a key of name {' and '.join(map(repr, whose))}, and name is {name!r}"
    return Problem(key, "foreign", value, rule, f"remove it, or use {whose[0]}")


def foreign_table(config: Any, table: str, name: str) -> Iterator[Problem]:
    """Problems of options in a `table` that only the part `name` reads, where `config.name` is another one."""
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


def _values(config: object, names: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Fields by name, without those that are None by default and None now."""
    for name in names:
        value = getattr(config, name)
        if value is not None or getattr(type(config), name, 0) is not None:
            yield name, value


def size_problems(config: object, sizes: dict[str, int]) -> Iterator[Problem]:
    """Problems of fields that are not integers from 1 to a maximum; None is allowed where it is the default."""
    for name, value in _values(config, sizes):
        if not is_size(value, sizes[name]):
            rule = f"must be a whole number, at least 1 and at most {sizes[name]}"
            yield Problem(name, "range", value, rule, "give one in that range")


def number_problems(config: object, low: int, fixes: Mapping[str, str]) -> Iterator[Problem]:
    """Problems of fields that are not finite numbers above `low`; None is allowed where it is the default."""
    for name, value in _values(config, fixes):
        if not (is_finite(value) and value > low):
            rule = f"must be a finite number above {low}"
            yield Problem(name, "range", value, rule, fixes[name])


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
