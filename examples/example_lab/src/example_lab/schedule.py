"""A learning rate that halves in steps."""

from collections.abc import Callable
from typing import Any


def halving(
    config: Any, total_steps: int, *, every: int, floor: float = 0.0
) -> Callable[[int], float]:
    """Factor of step 1, 2, ...: halved each `every` steps, never below `floor`."""
    if every < 1:
        raise ValueError(f"schedule.options.every {every} is too short; use 1000")
    return lambda step: max(floor, 0.5 ** ((step - 1) // every))
