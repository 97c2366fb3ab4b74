"""Raw tables to typed dataclasses, strictly: no coercion, unknown keys are errors, all problems at once."""

from __future__ import annotations

import difflib
import functools
import keyword
import math
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import cattrs
from cattrs.errors import ClassValidationError, IterableValidationError
from cattrs.gen import make_dict_structure_fn, override

from forge_train._shared.problems import Problem, invalid
from forge_train.config.init import InitConfig
from forge_train.config.schema import BuiltInModelConfig, ImportedModelConfig, JobConfig
from forge_train.config.vlm import VLMModelConfig
from forge_train.errors import problems_under

#: The [model] tables of our own models, by name.
BUILT_IN_MODELS: dict[str, type[BuiltInModelConfig]] = {
    "transformer": BuiltInModelConfig,
    "vlm": VLMModelConfig,
}


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
    table = _known_part(table, kind, name, problems)
    if table is _DROPPED:
        return None, problems
    try:
        return _CONVERTER.structure(table, kind), problems
    except Exception as error:
        return None, [*problems, *_explain(error, name)]


def section_types(values: Mapping[str, Any]) -> dict[str, Any]:
    """The dataclass of each section, or a dict of such; [model] depends on its own `name`."""
    hints = dict(get_type_hints(JobConfig))
    model = values.get("model", {})
    name = model.get("name", "transformer") if isinstance(model, dict) else "transformer"
    known = isinstance(name, str) and name in BUILT_IN_MODELS
    hints["model"] = BUILT_IN_MODELS[name] if known else ImportedModelConfig
    return hints


def dotted_fields(kind: Any, key: str) -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, type, dataclass field) of every leaf of a table `key`; `<name>` stands for a table's key."""
    cls: Any = inner_dataclass(kind)
    prefix = f"{key}.<name>." if get_origin(kind) is dict else f"{key}."
    hints = get_type_hints(cls)
    for item in fields(cls):
        key = f"{prefix}{key_of(item.name)}"
        if inner_dataclass(hints[item.name]) is None:
            yield key, hints[item.name], item
        else:
            yield from dotted_fields(hints[item.name], key)


def key_of(field: str) -> str:
    """The key of a dataclass's field: its name, and `from` of `from_`, as Python keeps that word for itself."""
    return field.removesuffix("_")


def type_name(kind: Any) -> str:
    """A type as the command line shows it: `int or none`, `'a' or 'b'`, `list of str`."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
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
    """The dataclass in `X`, `X | None` or `dict[str, X]`; None when there is none."""
    candidates = [kind, *get_args(kind)]
    return next((c for c in candidates if isinstance(c, type) and is_dataclass(c)), None)


def _known_part(table: Any, kind: Any, key: str, problems: list[Problem]) -> Any:
    """The table `key` without the keys that its `kind` does not have, each of which becomes a problem.

    The rest is checked as if they were not there, so that a misspelt key hides no other problem.
    """
    cls: Any = inner_dataclass(kind)
    is_free = get_origin(kind) is dict
    if (cls is None and not is_free) or (_is_optional(kind) and table in (None, "none")):
        return table
    if not isinstance(table, dict):
        fix = f"write [{key}] and its keys"
        problems.append(Problem(key, "table", table, "must be a table", fix))
        return _DROPPED
    if is_free:
        if cls is not None:
            problems += _names_of_tables(table, key)
        hints = dict.fromkeys(table, cls or Any)
    else:
        hints = {key_of(name): kind for name, kind in get_type_hints(cls).items()}
    siblings = [f"{key}.{name}" for name in hints]
    problems += _unknowns([f"{key}.{name}" for name in table if name not in hints], siblings)
    kept = {
        name: _known_part(value, hints[name], f"{key}.{name}", problems)
        for name, value in table.items()
        if name in hints
    }
    return {name: value for name, value in kept.items() if value is not _DROPPED}


def _names_of_tables(table: Mapping[str, Any], key: str) -> Iterator[Problem]:
    """Problems of names that cannot be part of a flag, `--data.sources.NAME.path`."""
    rule = "must be letters, digits and underscores"
    for name in table:
        if not name.isidentifier() or keyword.iskeyword(name):
            yield Problem(key, "name", name, rule, "rename it")


_DROPPED = object()  # a value that is not the table that it must be


# ---- strict leaves

_ARTICLES = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}


def _rejected(value: Any, rule: str, fix: str = "", *, code: str) -> Any:
    """The error of a leaf; `_explain` adds its key."""
    return invalid("", code, value, rule, fix)


def _of_another_type(value: Any, expected: str) -> Any:
    rule = f"is of type {type(value).__name__} and must be {expected}"
    return _rejected(value, rule, code="type")


def _strict(expected: type) -> Any:
    accepted = (int, float) if expected is float else expected

    def hook(value: Any, _: Any) -> Any:
        if isinstance(value, bool) != (expected is bool) or not isinstance(value, accepted):
            raise _of_another_type(value, _ARTICLES[expected])
        return _clean_text(str(value)) if expected is str else _finite(value, expected)

    return hook


def _finite(value: Any, kind: type) -> Any:
    """A number that 64 bits hold; nan and inf would come back as a loss, hours later."""
    if isinstance(value, int) and value.bit_length() >= 64:
        raise _rejected(
            value, "must be a number that 64 bits hold", "use fewer zeros", code="range"
        )
    if not math.isfinite(value):
        raise _rejected(value, "must be a finite number", code="finite")
    return kind(value)


def _clean_text(text: str) -> str:
    """Text as files, paths and terminals take it."""
    try:
        good = b"\0" not in text.encode()
    except UnicodeEncodeError:  # bytes of a command line that are no UTF-8
        good = False
    if not good:
        raise _rejected(text, "must be UTF-8 text without NUL", "write it again", code="not_utf8")
    return text


def _literal(value: Any, kind: Any) -> Any:
    for choice in get_args(kind):
        if value == choice and type(value) is type(choice):
            return value
    written = value[:_SHOWN_CHARACTERS] if isinstance(value, str) else ""
    near = difflib.get_close_matches(written, [str(c) for c in get_args(kind)], 1)
    fix = f"did you mean '{near[0]}'?" if near else ""
    raise _rejected(value, f"must be {type_name(kind)}", fix, code="unknown")


def _tuple(value: Any, kind: Any) -> Any:
    args = get_args(kind)
    if not isinstance(value, list | tuple):
        raise _of_another_type(value, f"a {type_name(kind)}")
    if args[-1] is Ellipsis:
        return tuple(_CONVERTER.structure(v, args[0]) for v in value)
    if len(value) != len(args):
        raise _rejected(value, f"must be a {type_name(kind)}", code="length")
    return tuple(_CONVERTER.structure(v, a) for v, a in zip(value, args))


def _optional(value: Any, kind: Any) -> Any:
    if value is None or value == "none":  # TOML has no null
        return None
    return _CONVERTER.structure(value, without_none(kind))


def without_none(kind: Any) -> Any:
    """`X` of `X | None`, which may be a union itself."""
    return functools.reduce(operator.or_, [a for a in get_args(kind) if a is not type(None)])


def _number_or_text(value: Any, kind: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise _of_another_type(value, type_name(kind))
    return _CONVERTER.structure(value, str if isinstance(value, str) else int)


def _is_optional(kind: Any) -> bool:
    return is_union(kind) and type(None) in get_args(kind)


def is_union(kind: Any) -> bool:
    """True for `X | Y`."""
    return get_origin(kind) in (Union, types.UnionType)


def _is(origin: Any) -> Callable[[Any], bool]:
    return lambda kind: get_origin(kind) is origin


def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(detailed_validation=True)
    for expected in (int, float, bool, str):
        converter.register_structure_hook(expected, _strict(expected))
    converter.register_structure_hook_func(_is(Literal), _literal)
    converter.register_structure_hook_func(_is(tuple), _tuple)
    converter.register_structure_hook_func(
        lambda k: is_union(k) and set(get_args(k)) == {int, str}, _number_or_text
    )
    converter.register_structure_hook_func(_is_optional, _optional)
    as_toml = make_dict_structure_fn(InitConfig, converter, from_=override(rename="from"))
    converter.register_structure_hook(InitConfig, as_toml)
    return converter


_CONVERTER = _converter()
_SHOWN_KEYS, _SHOWN_CHARACTERS = 20, 200


# ---- problems


def _explain(error: BaseException, path: str) -> list[Problem]:
    """The problems of cattrs' nested groups, with dotted keys."""
    if isinstance(error, ClassValidationError | IterableValidationError):
        with_notes, without = error.group_exceptions()
        problems = []
        for inner, note in with_notes:
            name = getattr(note, "name", getattr(note, "index", "?"))
            problems.extend(_explain(inner, f"{path}.{key_of(str(name))}"))
        for inner in without:
            problems.extend(_explain(inner, path))
        return problems
    if isinstance(error, KeyError):  # a key without default
        key = path if path.endswith(f".{error.args[0]}") else f"{path}.{error.args[0]}"
        return [Problem(key, "missing", ..., "is missing and has no default", "give it a value")]
    return problems_under(error, path)


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
