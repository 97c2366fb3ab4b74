"""Problems of configurations and models: sentences of value, rule and fix, raised together."""

import re
from collections.abc import Iterable


def raise_problems(where: str, problems: Iterable[str]) -> None:
    """Raise one ValueError with a line `where: problem` for each problem; do nothing without any."""
    lines = [f"{where}: {problem}" for problem in problems]
    if lines:
        raise ValueError("\n".join(lines))


def merge_layers(problems: list[str]) -> str:
    """One line for problems that differ only in the number of the layer: the first of them and a count."""
    alike: dict[str, list[str]] = {}
    for problem in problems:
        alike.setdefault(re.sub(r"\.\d+(?=\.)", ".*", problem), []).append(problem)
    return "\n".join(
        first + (f" (and {len(others)} more like it)" if others else "")
        for first, *others in alike.values()
    )
