"""`--section.key value` on the command line, parsed and documented by tyro from the same dataclasses."""

from __future__ import annotations

import copy
import dataclasses
import functools
import keyword
import tomllib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import tyro

from forge_train._shared.problems import invalid
from forge_train.command_line import PATHS
from forge_train.config.layers import NAMED_TABLES
from forge_train.config.structure import (
    dotted_fields,
    fits,
    inner_dataclass,
    key_of,
    section_types,
    type_name,
    without_none,
)
from forge_train.errors import ConfigError

_NONE = Literal["none"]
_BOOL = Literal["true", "false"]  # as in TOML; tyro's own are True and False


def parse_flags(
    values: Mapping[str, Any],
    args: Sequence[str],
    prog: str,
    description: str,
    own: type | None = None,
) -> dict[str, Any]:
    """Dotted key -> value of each flag in `args`; `values` are those of the file, shown as defaults.

    A list is words, or one list of TOML; `--optimizer.options.KEY` gives a key of a free table, and a flag of a named
    table begins that table where the file has none. `own` is a dataclass of further flags, those of the verb: all of
    them are in the result, by name. Prints help and exits on `--help`; exits with tyro's message and status 2 on a
    bad flag, or raises ConfigError.
    """
    items = () if own is None else dataclasses.fields(own)
    defaults = {item.name: item.default for item in items}
    types = section_types(values)
    args, written = _take_written(args, types)
    if not args and dataclasses.MISSING not in defaults.values():
        return written | defaults  # the parser alone costs most of a second
    shadow = _shadow("Flags", types, _with_named_tables(values, args))
    names = list(defaults)
    if own is not None:  # keyword-only, as some of them have no default
        shadow = dataclasses.make_dataclass(
            "Flags", (), bases=(own, shadow), frozen=True, kw_only=True
        )
    with PATHS:
        parsed: Any = tyro.cli(
            shadow, prog=prog, description=description, args=list(args), use_underscores=True
        )
    given = [arg[2:].split("=", 1)[0].replace("-", "_") for arg in args if arg.startswith("--")]
    keys = [key for key in given if "." in key]
    found = {key: _value_at(parsed, key) for key in keys} | written
    return found | {name: getattr(parsed, name) for name in names}


def _take_written(
    args: Sequence[str], types: Mapping[str, Any]
) -> tuple[list[str], dict[str, Any]]:
    """The arguments without those that tyro has no form for, lists of TOML and keys of free tables, and these:
    {dotted key: value}."""
    if not any("[" in arg or "." in arg for arg in args):
        return list(args), {}
    kinds = {
        key: kind
        for section, table in types.items()
        for key, kind, _ in dotted_fields(table, section)
    }
    rest: list[str] = []
    written: dict[str, Any] = {}
    position = 0
    while position < len(args):
        name, equals, text = args[position].partition("=")
        used = 1 if equals else 2
        if not equals:
            text = "".join(args[position + 1 : position + 2])
        found = None
        if name.startswith("--") and "." in name:
            found = _written(name[2:], text, kinds)
        if found is None:
            rest.append(args[position])
            position += 1
            continue
        written.update([found])
        position += used
    return rest, written


def _written(name: str, text: str, kinds: Mapping[str, Any]) -> tuple[str, Any] | None:
    """(dotted key, value) of a list of TOML or of a key of a free table; None for any other flag."""
    key = name.replace("-", "_")
    kind = kinds.get(_generic(key))
    if kind is not None and get_origin(kind) is dict:
        fix = f"give a key of it, --{name}.KEY VALUE"
        raise invalid(f"--{name}", "table", text, "is a table", fix, kind=ConfigError)
    kind = without_none(kind) if type(None) in get_args(kind) else kind
    if get_origin(kind) is tuple and text.startswith("[") and text.endswith("]"):
        value = _as_toml(text)
        if isinstance(value, list):
            return key, value
        if "," in text:
            rule = (
                f"must be a {type_name(kind)}, and is not a list of TOML: the shell removes quotes"
            )
            fix = f'write --{name} \'["a", "b"]\', or only the words'
            raise invalid(f"--{name}", "type", text, rule, fix, kind=ConfigError)
        return None  # a pattern may be [ab]
    for end in (i for i, letter in enumerate(key) if letter == "."):
        table = kinds.get(_generic(key[:end]))
        if get_origin(table) is dict:
            value = text if get_args(table)[1] is str else _as_toml(text)
            return key[:end] + name[end:], value
    return None


def _generic(key: str) -> str:
    """A key with `<name>` in place of the name of a table."""
    for table in NAMED_TABLES:
        if key.startswith(f"{table}."):
            _, dot, last = key[len(table) + 1 :].partition(".")
            return f"{table}.<name>{dot}{last}"
    return key


def _as_toml(text: str) -> Any:
    """The value that TOML reads there; the text itself where it reads none."""
    try:
        table = tomllib.loads(f"value = {text}")
    except ValueError:
        return text
    return table["value"] if len(table) == 1 else text


def _with_named_tables(values: Mapping[str, Any], args: Sequence[str]) -> dict[str, Any]:
    """`values` with the tables that flags begin, empty."""
    found = copy.deepcopy(dict(values))
    for arg in args:
        key = arg[2:].partition("=")[0].replace("-", "_") if arg.startswith("--") else ""
        for table in (table for table in NAMED_TABLES if key.startswith(f"{table}.")):
            name = key[len(table) + 1 :].partition(".")[0]
            if name.isidentifier() and not keyword.iskeyword(name):
                _begin(found, [*table.split("."), name])
    return found


def _begin(values: dict[str, Any], path: Sequence[str]) -> None:
    for part in path:
        inner = values.setdefault(part, {})
        if not isinstance(inner, dict):
            return
        values = inner


def _value_at(parsed: Any, dotted: str) -> Any:
    names = (f"{part}_" if keyword.iskeyword(part) else part for part in dotted.split("."))
    value = functools.reduce(getattr, names, parsed)
    return {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value


def _shadow(name: str, types: Mapping[str, Any], values: Mapping[str, Any]) -> type:
    """A dataclass of the same shape with every field optional and nothing validated.

    Flags are checked together with the file afterwards, so that all problems come in one message.
    """
    members = []
    for key, kind in types.items():
        inner = inner_dataclass(kind)
        raw = values.get(key)
        table = raw if isinstance(raw, dict) else {}
        if inner is None:
            continue
        if get_origin(kind) is dict:
            child = _shadow(key, dict.fromkeys(table, inner), table)
        else:
            child = _shadow_fields(key, inner, table)
        members.append((key, child, dataclasses.field(default_factory=child)))
    return dataclasses.make_dataclass(name, members, frozen=True)


def _shadow_fields(name: str, cls: type, values: Mapping[str, Any]) -> type:
    hints = get_type_hints(cls)
    members: list[Any] = []
    for item in dataclasses.fields(cls):
        kind = hints[item.name]
        if inner_dataclass(kind) is not None:
            members.extend(_nested(item.name, kind, values))
        elif get_origin(kind) is not dict:  # a free table is for the file alone
            members.append((item.name, *_leaf(kind, item, values.get(key_of(item.name)))))
    return dataclasses.make_dataclass(name, members, frozen=True)


def _nested(name: str, kind: Any, values: Mapping[str, Any]) -> list[Any]:
    shadow = _shadow(name, {name: kind}, values)
    return [(item.name, item.type, item) for item in dataclasses.fields(shadow)]


def _leaf(kind: Any, item: Any, raw: Any) -> tuple[Any, Any]:
    default = raw if raw is not None and fits(raw, kind) else item.default
    if default is dataclasses.MISSING:
        kind, default = kind | None, None
    if type(None) in get_args(kind):  # `none` here as in a file, where structure() reads it
        kind = without_none(kind)
        kind = (_BOOL if kind is bool else kind) | _NONE
        default = "none" if default is None else default
    if kind is bool:
        kind = _BOOL
    if isinstance(default, bool):
        default = str(default).lower()
    if isinstance(default, list):
        default = tuple(default)
    help = tyro.conf.arg(
        help=item.metadata.get("help", "").replace("%", "%%"),
        name=key_of(item.name) if item.name.endswith("_") else None,
    )
    return Annotated[kind, help], dataclasses.field(default=default)
