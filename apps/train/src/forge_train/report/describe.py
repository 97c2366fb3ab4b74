"""Every key with its type, range, default and meaning: for help, `explain` and the documentation page."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from docstring_parser import parse_from_object
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from forge_train._shared.problems import invalid, problems_of
from forge_train._shared.toml_files import flatten
from forge_train.build.resolve import ResolvedJob, is_default
from forge_train.config.model import BUILT_IN_MODELS
from forge_train.config.structure import dotted_fields, is_union, key_of, section_types, type_name
from forge_train.errors import ConfigError


class KeyRow(NamedTuple):
    key: str
    type: str
    default: str
    meaning: str
    range: str


def key_rows() -> Iterator[KeyRow]:
    """One row per configuration key, of all of our models; `<name>` stands for a name that the user chooses."""
    seen = set()
    for section, table in section_types({}).items():
        tables = list(BUILT_IN_MODELS.values()) if section == "model" else [table]
        for key, kind, item, cls in (row for t in tables for row in dotted_fields(t, section)):
            if key not in seen:
                seen.add(key)
                about, limits = help_of(item, cls), _range(kind, item, cls)
                yield KeyRow(key, type_name(kind), _default(item), about, limits)


def print_keys(prefix: str, console: Console, values: Mapping[str, Any] | None = None) -> int:
    """Print the keys that begin with `prefix`, for an exit code of 0; the default of a key in `values` is that value.

    ConfigError if there are none.
    """
    given = {key: _show(value) for key, value in flatten(values or {})}
    found = [one for one in key_rows() if one.key.startswith(prefix)]
    if not found:
        fix = "give the beginning of a key, such as model."
        raise invalid("PREFIX", "unknown", prefix, "begins no key", fix, kind=ConfigError)
    for one in found:
        default = given.get(one.key, one.default)
        kind = f"{one.type}, {one.range}" if one.range else one.type
        about = f"  {one.key}  ({kind}; default {default})"
        console.print(about, highlight=False, markup=False)
        console.print(Padding(one.meaning, (0, 0, 0, 6)), highlight=False, markup=False)
    return 0


def print_explanation(job: ResolvedJob, console: Console, changed: bool = False) -> None:
    """The resolved configuration, one line per key: value and where it came from.

    changed: only the keys whose values are not defaults.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("key", no_wrap=True)  # never cut: keys are there to be copied
    table.add_column("value", overflow="fold")
    table.add_column("origin", overflow="fold")
    for key, value in job.values().items():
        origin = job.origin(key)
        if changed and (origin == "default" or is_default(key, value)):
            continue
        style = "dim" if origin == "default" else None
        table.add_row(key, _show(value), origin, style=style)
    console.print(table)


def help_of(item: dataclasses.Field[Any], cls: type) -> str:
    """What a field means: its `help`, or the text below it in the source of the class that declares it."""
    if item.metadata.get("help"):
        return str(item.metadata["help"])
    owner = next(base for base in cls.__mro__ if item.name in inspect.get_annotations(base))
    return " ".join(_texts_of(owner).get(item.name, "").split())


@functools.cache
def _texts_of(cls: type) -> dict[str, str]:
    """The texts below the fields that a class declares; parses its file."""
    return {param.arg_name: param.description or "" for param in parse_from_object(cls).params}


#: A number below the range of every key that has one.
_BELOW = -(10**30)
_RANGE_CODES = ("range", "size", "finite")


def _range(kind: Any, item: dataclasses.Field, cls: type) -> str:
    """The range of a number: that of its field, or the rule by which its class rejects a number far below.

    Empty for other types.
    """
    numbers = [k for k in (get_args(kind) if is_union(kind) else (kind,)) if k in (int, float)]
    if not numbers:
        return ""
    if "range" in item.metadata:
        return str(item.metadata["range"])

    hints, absent = get_type_hints(cls), (dataclasses.MISSING, dataclasses.MISSING)
    required = [f.name for f in dataclasses.fields(cls) if (f.default, f.default_factory) == absent]
    given = {
        key: 1 if hints[key] is int else (get_origin(hints[key]) or hints[key])()
        for key in required
    }
    try:
        cls(**{**given, item.name: numbers[0](_BELOW)})
    except ValueError as error:
        for problem in problems_of(error):
            if problem.key.rpartition(".")[2] == key_of(item.name) and problem.code in _RANGE_CODES:
                return problem.rule.removeprefix("must be ")
    return ""


def _default(item: dataclasses.Field) -> str:
    if item.default is not dataclasses.MISSING:
        return _show(item.default)
    if item.default_factory is not dataclasses.MISSING:
        return _show(item.default_factory())
    return "from the data" if item.name == "vocab_size" else "required"


def _show(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_show(v) for v in value) + "]"
    return repr(value) if isinstance(value, str) else str(value)
