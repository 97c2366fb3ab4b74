"""Parts by name: built in, installed by another package, or by import path; and the options they take."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from forge_core._shared.problems import Problem, invalid, problems_of, raise_problems

__all__ = ["Registry", "installed", "options_table"]


class Registry(NamedTuple):
    """Table of parts by name: built in, entry points of other packages, and import paths.

    key: the setting that holds a name, for messages. group: of entry points, such as `forge.optimizers`. arguments:
    arguments of a part, before its options. built_in: the parts of this package. built_in_options: whether they take
    options; else their settings are keys of a section.
    """

    key: str
    group: str
    arguments: tuple[str, ...]
    built_in: Mapping[str, Callable[..., Any]]
    built_in_options: bool = False

    def find(self, name: str) -> Any:
        """Return the part of a name: a built-in name, an entry point, or an import path `module:attr`.

        Entry points are read only for a name that is not built in. Raises ValueError for an unknown name
        (with the nearest known one) and for a path that cannot be imported.
        """
        if name in self.built_in:
            return self.built_in[name]
        if ":" in name:
            return _from_path(name, self.key)
        installed = {entry.name: entry for entry in entry_points(group=self.group)}
        if name in installed:
            return installed[name].load()
        known = sorted({*self.built_in, *installed})
        near = difflib.get_close_matches(name, known, n=1)
        listed = f"known in {self.group}: {', '.join(known) or 'none'}"
        rule = f"is unknown: {listed}, anything else is an import path module:attr"
        fix = f"did you mean {near[0]!r}?" if near else "use a name or a path of yours"
        raise invalid(self.key, "unknown", name, rule, fix)

    def bound(
        self, tables: Mapping[str, tuple[str, Mapping[str, Any]]]
    ) -> dict[str, Callable[..., Any]]:
        """Return the parts of several tables, {table: (name, options)}, each with its options bound.

        The table's name replaces `<name>` in the key. ValueError with all problems of all tables.
        """
        problems: list[Problem] = []
        for table, (name, options) in tables.items():
            registry = self._replace(key=self.key.replace("<name>", table))
            problems += registry.problems(name, options)
        raise_problems("", problems)
        return {t: partial(self.find(name), **options) for t, (name, options) in tables.items()}

    def problems(self, name: str, options: Mapping[str, Any]) -> tuple[Problem, ...]:
        """Return the problems of a name and its options, as `checked` raises them."""
        try:
            self.checked(name, options)
        except ValueError as error:
            return problems_of(error)
        return ()

    def checked(self, name: str, options: Mapping[str, Any]) -> Any:
        """Return the part of a name without calling it; ValueError with all problems unless it takes `options`."""
        part = self.find(name)
        self.check(part, name, options)
        return part

    def check(
        self, part: Any, name: str, options: Mapping[str, Any], given: Collection[str] = ()
    ) -> None:
        """Compare options with the signature of the part; ValueError with all problems.

        given: keywords of the call next to the options.
        """
        raise_problems("", self._option_problems(part, name, options, given))

    def _option_problems(
        self, part: Any, name: str, options: Mapping[str, Any], given: Collection[str]
    ) -> list[Problem]:
        """Problems of options that do not fit the signature of a part."""
        table = options_table(self.key)
        if name in self.built_in and not self.built_in_options:
            section = self.key.rpartition(".")[0]
            rule = f"cannot be given: {name!r} is built in and takes no options"
            fix = f"use the keys of [{section}], or name a part of your own"
            return [Problem(f"{table}.{k}", "built_in", v, rule, fix) for k, v in options.items()]

        call = f"{name}({', '.join((*self.arguments, '**options'))})"
        if not callable(part):
            rule = f"is of type {type(part).__name__} and must be callable as {call}"
            return [Problem(self.key, "type", name, rule, "name a function or a class")]

        count = len(self.arguments)
        parameters = list(inspect.signature(part).parameters.values())
        kinds = [p.kind for p in parameters]
        positional = [
            p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        if len(positional) < count and inspect.Parameter.VAR_POSITIONAL not in kinds:
            rule = f"takes {len(positional)} arguments by position and is called as {call}"
            return [Problem(self.key, "positional", name, rule, "give it those")]

        reserved = {*(p.name for p in positional[:count]), *given}
        keywords = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        taken = {p.name: p for p in parameters if p.kind in keywords and p.name not in reserved}
        any_key = inspect.Parameter.VAR_KEYWORD in kinds

        # options that it does not take, then options that it needs, then values of another type
        rule = f"is not an option of {name!r}"
        problems = [
            Problem(f"{table}.{key}", "unknown_key", value, rule, _nearest(key, list(taken)))
            for key, value in options.items()
            if key not in taken and (key in reserved or not any_key)
        ]
        rule = f"is missing, and {name!r} has no default for it"
        problems += [
            Problem(f"{table}.{key}", "missing", ..., rule, f"give it in [{table}]")
            for key, p in taken.items()
            if p.default is p.empty and key not in options
        ]

        hints = _hints(part)
        for key in taken:
            if key in options and not _fits(options[key], hints.get(key)):
                rule = f"must be of type {_type_name(hints[key])}, as {name!r} annotates it"
                problems.append(Problem(f"{table}.{key}", "type", options[key], rule, "correct it"))
        return problems


def options_table(key: str) -> str:
    """Return the key of the options of a part: `x.options` for a part named by `x.name`, `y_options` for `y`."""
    section, _, last = key.rpartition(".")
    return f"{section}.options" if last == "name" else f"{key}_options"


def installed(name: str, group: str) -> bool:
    """Whether a package installed an entry point of that name."""
    return any(entry.name == name for entry in entry_points(group=group))


def _nearest(key: str, names: list[str]) -> str:
    """The fix for an unknown option: the nearest one, or all."""
    near = difflib.get_close_matches(key, names, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"it takes {', '.join(names)}" if names else "it takes none: remove it"


def _hints(part: Any) -> dict[str, Any]:
    """Annotations of a part, or none if they cannot be read."""
    try:
        return get_type_hints(part.__init__ if isinstance(part, type) else part)  # type: ignore[misc]
    except Exception:  # annotations may name what exists for type checkers only
        return {}


def _type_name(hint: Any) -> str:
    """An annotation as it is written in source."""
    if isinstance(hint, type) and not get_args(hint):
        return hint.__name__
    return str(hint).replace("typing.", "")


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a plain type, or a list, table or choice of them; True for other annotations."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, arg) for arg in args if arg is not type(None))
    if origin is Literal:
        return value in args
    if origin is list:
        return isinstance(value, list | tuple) and all(_fits(item, args[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(item, args[1]) for item in value.values())
    if hint not in (bool, int, float, str):
        return True
    if isinstance(value, bool) or hint is bool:
        return isinstance(value, bool) and hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


def _from_path(path: str, key: str) -> Any:
    module_name, _, attribute = path.partition(":")
    try:
        return getattr(import_module(module_name), attribute)
    except (ImportError, AttributeError, SyntaxError, ValueError) as error:
        rule = f"cannot be imported ({error}): a name with a colon is module:attr"
        fix = "install the module or correct the path"
        raise invalid(key, "import", path, rule, fix) from error
