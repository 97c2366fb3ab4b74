"""Rules of a config as rows: what may not be, the message, the fix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple


class Rule(NamedTuple):
    """One thing a config must not be. `message` and `fix` are `str.format` templates over its fields."""

    name: str
    broken: Callable[[Mapping[str, Any]], bool]
    message: str
    fix: str


def check(config: Mapping[str, Any], rules: Iterable[Rule], where: str) -> None:
    """Raise one ValueError with a line `where: message; fix` for every broken rule."""
    broken = [
        f"{where}: {rule.message.format(**config)}; {rule.fix.format(**config)}"
        for rule in rules
        if rule.broken(config)
    ]
    if broken:
        raise ValueError("\n".join(broken))
