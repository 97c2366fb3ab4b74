"""The JSON schema of a configuration file, for editors that complete and check TOML."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from forge_train.config.model import BUILT_IN_MODELS, ImportedModelConfig
from forge_train.config.structure import key_of, section_types
from forge_train.report.describe import help_of

_NAMES = {int: "integer", float: "number", bool: "boolean", str: "string"}


def json_schema() -> dict[str, Any]:
    """Schema (draft 2020-12) of a job's file: types, ranges, choices and texts of all keys.

    A file that `forge-train run` takes is valid; rules between keys are not in it. No table has a required key,
    since a file may extend another one.
    """
    tables = {name: _schema(kind) for name, kind in section_types({}).items()}
    *built_in, imported = (_schema(k) for k in [*BUILT_IN_MODELS.values(), ImportedModelConfig])
    # the largest of our own models has the keys of all; the first schema that fits is what an editor shows
    tables["model"] = {"anyOf": [*reversed(built_in), imported]}

    base = {"type": "string", "description": "path of the file that this one is laid over"}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "forge-train job",
        **_table({"extends": base, **tables}),
    }


def _table(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": dict(properties)}


def _schema(kind: Any) -> dict[str, Any]:
    """The schema of a type: a table for a dataclass, `none` as text, since TOML has no null."""
    origin, args = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        return _table(
            {
                key_of(f.name): _of_field(f, hints[f.name], kind)
                for f in dataclasses.fields(kind)
                if f.init
            }
        )
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(arg) for arg in args]}

    if origin is Literal:
        return {"enum": list(args)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema(args[1])}

    if origin in (tuple, list):
        same = origin is list or args[-1] is Ellipsis
        length = {} if same else {"minItems": len(args), "maxItems": len(args)}
        return {"type": "array", "items": _schema(args[0]), **length}
    if kind is type(None):
        return {"const": "none"}
    return {"type": _NAMES[kind]} if kind in _NAMES else {}


def _of_field(item: dataclasses.Field[Any], kind: Any, owner: Any) -> dict[str, Any]:
    """The schema of a field, with its text, default and range."""
    schema = _schema(kind)
    between = item.metadata.get("between")
    if between is not None:
        low, high = between
        least = "exclusiveMinimum" if item.metadata.get("positive") and low == 0 else "minimum"
        limits = {least: low} | ({"maximum": high} if high < float("inf") else {})
        for branch in schema.get("anyOf", [schema]):
            if branch.get("type") in ("integer", "number"):
                branch |= limits

    text = help_of(item, owner)
    plain = item.default if isinstance(item.default, bool | int | float | str) else None
    return (
        schema
        | ({"description": text} if text else {})
        | ({} if plain is None else {"default": plain})
    )
