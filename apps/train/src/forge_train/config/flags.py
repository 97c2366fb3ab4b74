"""`--section.key value` on the command line, parsed and documented by tyro from the same dataclasses."""

from __future__ import annotations

import dataclasses
import functools
import keyword
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import tyro

from forge_train.config.structure import fits, inner_dataclass, key_of, section_types, without_none

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

    `own` is a dataclass of further flags, those of the verb: all of them are in the result, by name. Prints
    help and exits on `--help`; exits with tyro's message and status 2 on a bad flag.
    """
    items = () if own is None else dataclasses.fields(own)
    defaults = {item.name: item.default for item in items}
    if not args and dataclasses.MISSING not in defaults.values():
        return defaults  # the parser alone costs most of a second
    shadow = _shadow("Flags", section_types(values), values)
    names = list(defaults)
    if own is not None:  # keyword-only, as some of them have no default
        shadow = dataclasses.make_dataclass(
            "Flags", (), bases=(own, shadow), frozen=True, kw_only=True
        )
    parsed: Any = tyro.cli(
        shadow, prog=prog, description=description, args=list(args), use_underscores=True
    )
    given = [arg[2:].split("=", 1)[0].replace("-", "_") for arg in args if arg.startswith("--")]
    keys = [key for key in given if "." in key]
    return {key: _value_at(parsed, key) for key in keys} | {n: getattr(parsed, n) for n in names}


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
        kind, default = without_none(kind) | _NONE, "none" if default is None else default
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
