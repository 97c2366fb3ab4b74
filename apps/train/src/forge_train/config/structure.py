"""Raw tables to typed dataclasses, strictly: no coercion, unknown keys are errors, all problems at once."""

from __future__ import annotations

import difflib
import keyword
import math
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from forge_train._shared.problems import Problem, invalid
from forge_train.config.model import BUILT_IN_MODELS, ImportedModelConfig
from forge_train.config.schema import JobConfig
from forge_train.errors import problems_under


def structure(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Build every section of JobConfig from its raw table.

    Returns the sections that could be built and all problems of the others, with dotted keys.
    """
    built: dict[str, Any] = {}
    problems: list[Problem] = []
    types_of_sections = section_types(values)
    unknown = [name for name in values if name not in types_of_sections]
    problems += _unknowns(unknown, types_of_sections)
    for name, kind in types_of_sections.items():
        section, found = structure_table(values.get(name, {}), kind, name)
        problems += found
        if section is not None:
            built[name] = section
    return built, problems


def structure_table(table: Any, kind: Any, name: str) -> tuple[Any, list[Problem]]:
    """One table as its dataclass, or None, and all problems, with dotted keys."""
    problems: list[Problem] = []
    built = _structure(table, kind, name, problems)
    return (None if built in (_FAILED, _DROPPED) else built), problems


def section_types(values: Mapping[str, Any]) -> dict[str, Any]:
    """The dataclass of each section, or a dict of such; [model] depends on its own `name`."""
    hints = dict(get_type_hints(JobConfig))
    model = values.get("model", {})
    name = model.get("name", "transformer") if isinstance(model, dict) else "transformer"
    known = isinstance(name, str) and name in BUILT_IN_MODELS
    hints["model"] = BUILT_IN_MODELS[name] if known else ImportedModelConfig
    return hints


def dotted_fields(kind: Any, key: str) -> Iterator[tuple[str, Any, Any, type]]:
    """(dotted key, type, dataclass field, its class) of every leaf of a table `key`; `<name>` stands for a table's key."""
    cls: Any = inner_dataclass(kind)
    prefix = f"{key}.<name>." if get_origin(kind) is dict else f"{key}."
    hints = get_type_hints(cls)
    for item in fields(cls):
        key = f"{prefix}{key_of(item.name)}"
        if inner_dataclass(hints[item.name]) is None:
            yield key, hints[item.name], item, cls
        else:
            yield from dotted_fields(hints[item.name], key)


def key_of(field: str) -> str:
    """The key of a dataclass's field: its name, and `from` of `from_`, as Python keeps that word for itself."""
    return field.removesuffix("_")


def is_union(kind: Any) -> bool:
    """True for `X | Y`."""
    return get_origin(kind) in (Union, types.UnionType)


def type_name(kind: Any) -> str:
    """A type as the command line shows it: `int or none`, `'a' or 'b'`, `list of str`."""
    origin, args = get_origin(kind), get_args(kind)
    if is_union(kind):
        return " or ".join(type_name(a) for a in args)
    if origin is Literal:
        return " or ".join(f"'{a}'" for a in args)
    if origin is tuple:
        if args[-1] is Ellipsis:
            return f"list of {type_name(args[0])}"
        return f"list of {len(args)} {type_name(args[0])}s"
    if origin is dict:
        return "table"
    return "none" if kind is type(None) else getattr(kind, "__name__", str(kind))


def inner_dataclass(kind: Any) -> type | None:
    """The dataclass in `X`, `X | None` or `dict[str, X]`, or None."""
    candidates = [kind, *get_args(kind)]
    return next((c for c in candidates if isinstance(c, type) and is_dataclass(c)), None)


# ---- tables

#: A value with a problem: the table that holds it cannot be built.
_FAILED = object()
#: A value that is not the table that it must be: the table that holds it is built without it.
_DROPPED = object()


def _structure(value: Any, kind: Any, key: str, problems: list[Problem]) -> Any:
    """A value as its type, or _FAILED or _DROPPED and its problems.

    Unknown keys do not keep a table from being built, so that a misspelt one hides no other problem.
    """
    kinds = get_args(kind) if is_union(kind) else (kind,)
    if type(None) in kinds and (value is None or value == "none"):  # TOML has no null
        return None
    table = next((k for k in kinds if is_dataclass(k) or get_origin(k) is dict), None)

    if table is None:
        try:
            return _leaf(value, [k for k in kinds if k is not type(None)])
        except ValueError as error:
            problems += problems_under(error, key)
            return _FAILED
    if not isinstance(value, dict):
        fix = f"write [{key}] and its keys"
        problems.append(Problem(key, "table", value, "must be a table", fix))
        return _DROPPED
    build = _structure_dict if get_origin(table) is dict else _structure_fields
    return build(value, table, key, problems)


def _structure_dict(table: dict[str, Any], kind: Any, key: str, problems: list[Problem]) -> Any:
    """A table whose keys are free."""
    inner = get_args(kind)[1]
    if is_dataclass(inner):
        problems += _names_of_tables(table, key)
    else:
        for name in table:
            _structure(name, str, f"{key}.{name}", problems)
    found = {n: _structure(v, inner, f"{key}.{n}", problems) for n, v in table.items()}
    if _FAILED in found.values():
        return _FAILED
    return {name: value for name, value in found.items() if value is not _DROPPED}


def _structure_fields(table: dict[str, Any], kind: Any, key: str, problems: list[Problem]) -> Any:
    """A table as a dataclass."""
    known, hints = {key_of(item.name): item for item in fields(kind)}, get_type_hints(kind)
    unknown = [f"{key}.{name}" for name in table if name not in known]
    problems += _unknowns(unknown, [f"{key}.{name}" for name in known])

    found = {}
    for name, item in known.items():
        value = _DROPPED
        if name in table:
            value = _structure(table[name], hints[item.name], f"{key}.{name}", problems)
        if value is _DROPPED and item.default is item.default_factory is MISSING:
            rule, fix = "is missing and has no default", "give it a value"
            problems.append(Problem(f"{key}.{name}", "missing", ..., rule, fix))
            value = _FAILED
        if value is not _DROPPED:
            found[item.name] = value

    if _FAILED in found.values():
        return _FAILED
    try:
        return kind(**found)
    except Exception as error:
        problems += problems_under(error, key)
        return _FAILED


def _names_of_tables(table: Mapping[str, Any], key: str) -> Iterator[Problem]:
    """Problems of names that cannot be part of a flag, `--data.sources.NAME.path`."""
    rule = "must be letters, digits and underscores"
    for name in table:
        if not name.isidentifier() or keyword.iskeyword(name):
            yield Problem(key, "name", name, rule, "rename it")


# ---- strict leaves

_ARTICLES = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}


def _leaf(value: Any, kinds: Sequence[Any]) -> Any:
    """A value as one of the types, of which several are numbers and text. ValueError with one problem, without its key."""
    if kinds == [Any]:
        return value
    kind = next((k for k in kinds if isinstance(k, type) and isinstance(value, k)), kinds[0])
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return _choice(value, kind)
    if origin in (tuple, list):
        if not isinstance(value, list | tuple):
            raise _of_another_type(value, f"a {type_name(kind)}")
        if origin is tuple and args[-1] is not Ellipsis and len(value) != len(args):
            raise invalid("", "length", value, f"must be a {type_name(kind)}")
        return origin(_leaf(item, args[:1]) for item in value)

    accepted = (int, float) if kind is float else kind
    if isinstance(value, bool) != (kind is bool) or not isinstance(value, accepted):
        raise _of_another_type(value, " or ".join(_ARTICLES[k] for k in kinds))
    return _clean_text(str(value)) if kind is str else _finite(value, kind)


def _of_another_type(value: Any, expected: str) -> Any:
    rule = f"is of type {type(value).__name__} and must be {expected}"
    return invalid("", "type", value, rule)


def _finite(value: Any, kind: type) -> Any:
    """A number that 64 bits hold; nan and inf would come back as a loss, hours later."""
    if isinstance(value, int) and value.bit_length() >= 64:
        raise invalid("", "range", value, "must be a number that 64 bits hold", "use fewer zeros")
    if not math.isfinite(value):
        raise invalid("", "finite", value, "must be a finite number")
    return kind(value)


def _clean_text(text: str) -> str:
    """Text as files, paths and terminals take it."""
    try:
        good = b"\0" not in text.encode()
    except UnicodeEncodeError:  # bytes of a command line that are no UTF-8
        good = False
    if not good:
        raise invalid("", "not_utf8", text, "must be UTF-8 text without NUL", "write it again")
    return text


def _choice(value: Any, kind: Any) -> Any:
    for choice in get_args(kind):
        if value == choice and type(value) is type(choice):
            return value
    written = value[:_SHOWN_CHARACTERS] if isinstance(value, str) else ""
    near = difflib.get_close_matches(written, [str(c) for c in get_args(kind)], 1)
    fix = f"did you mean '{near[0]}'?" if near else ""
    raise invalid("", "unknown", value, f"must be {type_name(kind)}", fix)


# ---- problems

_SHOWN_KEYS, _SHOWN_CHARACTERS = 20, 200


def _unknowns(keys: list[str], known: Iterable[str]) -> list[Problem]:
    """A problem for each of the first; a file of something else has thousands."""
    names = list(known)
    shown = [_unknown(key, names) for key in keys[:_SHOWN_KEYS]]
    rest = len(keys) - _SHOWN_KEYS
    if rest > 0:
        fix = "is this a file of forge-train?"
        shown.append(Problem("", "unknown_keys", rest, "more keys are not known", fix))
    return shown


def _unknown(key: str, names: list[str]) -> Problem:
    key = key if len(key) <= _SHOWN_CHARACTERS else key[:_SHOWN_CHARACTERS] + "..."
    near = difflib.get_close_matches(key, names, 1, cutoff=0.5)
    fix = f"did you mean {near[0]}?" if near else f"known are {', '.join(names)}"
    return Problem(key, "unknown_key", ..., "is not a known key", fix)
