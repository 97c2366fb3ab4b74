"""Problems of a model with many layers."""

import re
from collections.abc import Iterable
from dataclasses import replace

from forge_parallel._shared.problems import Problem


def merge_layers(problems: Iterable[Problem]) -> list[Problem]:
    """One problem for those that differ only in the number of the layer: the first of them, with a count."""
    alike: dict[str, list[Problem]] = {}
    for problem in problems:
        alike.setdefault(re.sub(r"\.\d+(?=\.)", ".*", str(problem)), []).append(problem)
    return [
        replace(first, fix=f"{first.fix} (and {len(others)} more like it)") if others else first
        for first, *others in alike.values()
    ]
