"""Rules of configurations: rows of plain data, checked by one function."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple, get_args


class Rule(NamedTuple):
    """One sentence about a configuration. `message` and `fix` are `str.format` templates over its fields."""

    name: str
    broken: Callable[[Mapping[str, Any]], bool]
    message: str
    fix: str


_KINDS = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


def check_types(config: Any, where: str) -> None:
    """Raise one ValueError that lists every field of a dataclass that is not of its annotated type.

    True is no number and 2.0 no integer; an integer is a number. Literals are left to the rules.
    """
    broken = []
    for field in fields(config):
        value = getattr(config, field.name)
        allowed = get_args(field.type) or (field.type,)
        kind = next((kind for kind in allowed if kind in _KINDS), None)
        if kind is None or type(value) in (*allowed, int if kind is float else kind):
            continue
        empty = ", or leave it empty" if type(None) in allowed else ""
        broken.append(
            f"{where}: {field.name} {value!r} must be {_KINDS[kind]}; write it as one{empty}"
        )
    if broken:
        raise ValueError("\n".join(broken))


def check(config: Mapping[str, Any], rules: Iterable[Rule], where: str) -> None:
    """Raise one ValueError that lists every broken rule, a line each: `where: message; fix`."""
    broken = [
        f"{where}: {rule.message.format(**config)}; {rule.fix.format(**config)}"
        for rule in rules
        if rule.broken(config)
    ]
    if broken:
        raise ValueError("\n".join(broken))
