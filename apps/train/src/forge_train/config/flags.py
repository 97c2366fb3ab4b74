"""`--section.key value` on the command line: raw values over those of the file."""

from __future__ import annotations

import contextlib
import itertools
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_origin, get_type_hints

from forge_train._shared.problems import invalid
from forge_train.config.layers import Layers
from forge_train.config.structure import inner_dataclass, is_union, key_of, section_types
from forge_train.errors import ConfigError


def add_flags(layers: Layers, args: Sequence[str]) -> list[str]:
    """Set each `--section.key value` of `args` in `layers`, and return the other arguments.

    A value is text where its key takes text, else it is read as in TOML. A list is words, or one list of TOML;
    `--optimizer.options.KEY` gives a key of a free table. Nothing is checked: `structure` does that for files and
    flags alike. Raises ConfigError for a flag without a value.
    """
    rest, left = list[str](), list(args)
    while left:
        arg = left.pop(0)
        name, equals, text = arg.partition("=")
        if not (name.startswith("--") and "." in name):
            rest.append(arg)
            continue

        key, kind = _find(name[2:], section_types(layers.values))
        kinds = get_args(kind) if is_union(kind) else (kind,)
        items = next((get_args(k) for k in kinds if get_origin(k) in (tuple, list)), None)
        words = [text] if equals else [*itertools.takewhile(lambda a: a[:2] != "--", left)]
        words = words[:1] if items is None else words

        if not equals:
            del left[: len(words)]
        if not words and items is None:
            fix = f"write {name} VALUE"
            raise invalid(key, "missing", ..., "is given without a value", fix, kind=ConfigError)

        if items is None or (words == ["none"] and type(None) in kinds):
            value = _read(words[0], kinds)
        else:
            value = _read_list(words, items)
        layers.set(key, value, "flag")
    return rest


def _find(flag: str, types: Mapping[str, Any]) -> tuple[str, Any]:
    """The dotted key of a flag, which may have hyphens for underscores, and its type; None for an unknown key."""
    names, hints, kind = flag.split("."), types, None
    for depth, name in enumerate(names):
        inner = inner_dataclass(kind)
        if get_origin(kind) is dict and inner is None:  # a free table: its keys are as written
            kind = get_args(kind)[1]
            break
        names[depth] = name.replace("-", "_")
        kind = inner if get_origin(kind) is dict else hints.get(names[depth])
        inner = inner_dataclass(kind)
        hints = {} if inner is None else {key_of(k): v for k, v in get_type_hints(inner).items()}
    return ".".join(names), kind


def _read_list(words: Sequence[str], items: Sequence[Any]) -> Any:
    if len(words) == 1 and words[0].startswith("[") and words[0].endswith("]"):
        value = _read(words[0], ())
        # without the quotes that the shell removed it is no list; a pattern may be [ab]
        if isinstance(value, list) or "," in words[0]:
            return value
    return [_read(word, items) for word in words]


def _read(text: str, kinds: Sequence[Any]) -> Any:
    """A number or text where the type has it, else what TOML reads there; the text itself where it reads nothing."""
    for kind in (int, float, str):
        if kind in kinds:
            with contextlib.suppress(ValueError):
                return kind(text)
    try:
        table = tomllib.loads(f"value = {text}")
    except ValueError:
        return text
    return table["value"] if len(table) == 1 else text
