"""Rules of configurations: rows of plain data, checked by one function."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple


class Rule(NamedTuple):
    """One sentence about a configuration. `message` and `fix` are `str.format` templates over its fields."""

    name: str
    broken: Callable[[Mapping[str, Any]], bool]
    message: str
    fix: str


def check(config: Mapping[str, Any], rules: Iterable[Rule], where: str) -> None:
    """Raise one ValueError that lists every broken rule, a line each: `where: message; fix`."""
    broken = [
        f"{where}: {rule.message.format(**config)}; {rule.fix.format(**config)}"
        for rule in rules
        if rule.broken(config)
    ]
    if broken:
        raise ValueError("\n".join(broken))


def once(problems: list[str]) -> str:
    """Lines that say what several layers have in common of the first of them alone."""
    alike: dict[str, list[str]] = {}
    for problem in problems:
        alike.setdefault(re.sub(r"\.\d+(?=\.)", ".*", problem), []).append(problem)
    return "\n".join(
        first + (f" (and {len(others)} more like it)" if others else "")
        for first, *others in alike.values()
    )
