"""An extension of griffe, for the API pages of the site (mkdocs.yml): defaults and texts of the sources.

- A field `dim: int = setting(256, "width")` gets its default and its help text.
- An attribute below `#:` lines gets their text.
- `Raises: ValueError for ...` in one line, and `Usage::`, become bold words; griffe reads other sections in them.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from griffe import Attribute, Docstring, Expr, ExprCall, ExprKeyword, ExprLambda, Extension, Object

_SETTINGS = ("field", "_field", "setting")  # as in scripts/write_api_pages.py
_INLINE = re.compile(
    r"^(Cost|Example|Note|Raises|Returns|Usage|Yields):(?=[ ]\S)|^(\w+)::$", re.MULTILINE
)


class FieldsExtension(Extension):
    """Sets defaults, and docstrings as griffe and Markdown read them."""

    def on_instance(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = _INLINE.sub(lambda m: f"**{m[1] or m[2]}:**", obj.docstring.value)

    def on_attribute_instance(self, *, attr: Attribute, **kwargs: Any) -> None:
        if attr.docstring is None and (text := _text_above(attr) or _help(attr.value)):
            attr.docstring = Docstring(text, parent=attr, lineno=attr.lineno)
        if isinstance(attr.value, ExprCall) and _name(attr.value) in _SETTINGS[1:]:
            attr.value = _default(attr.value)


def _name(call: ExprCall) -> str:
    return str(call.function)


def _text_above(attr: Attribute) -> str:
    """The `#:` lines directly above."""
    assert isinstance(attr.filepath, Path)
    lines, found = attr.lines_collection[attr.filepath], list[str]()
    for line in reversed(lines[: (attr.lineno or 1) - 1]):
        if not line.strip().startswith("#:"):
            break
        found.insert(0, line.strip().removeprefix("#:").strip())
    return "\n".join(found)


def _arguments(call: ExprCall) -> tuple[list[Any], dict[str, Any]]:
    named = {a.name: a.value for a in call.arguments if isinstance(a, ExprKeyword)}
    return [a for a in call.arguments if not isinstance(a, ExprKeyword)], named


def _help(value: Any) -> str:
    """The help text of a setting."""
    if not isinstance(value, ExprCall) or _name(value) not in _SETTINGS[1:]:
        return ""
    places, named = _arguments(value)
    text = named.get("help", places[1] if len(places) > 1 else "''")
    try:
        return str(ast.literal_eval(str(text)))
    except (SyntaxError, ValueError):  # computed
        return ""


def _default(call: ExprCall) -> str | Expr | None:
    """The default of a setting; of a factory, the call."""
    places, named = _arguments(call)
    default = named.get("default", places[0] if places else None)
    return default.body if isinstance(default, ExprLambda) else default
