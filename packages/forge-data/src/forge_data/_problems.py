"""Problems of configurations: sentences of value, rule and fix, raised together."""

from collections.abc import Iterable


def raise_problems(where: str, problems: Iterable[str]) -> None:
    """Raise one ValueError with a line `where: problem` for each problem; do nothing without any."""
    lines = [f"{where}: {problem}" for problem in problems]
    if lines:
        raise ValueError("\n".join(lines))
