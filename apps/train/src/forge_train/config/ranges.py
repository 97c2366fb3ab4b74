"""Ranges of numbers that a section of a configuration allows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from forge_train._shared.problems import Problem


def range_problems(config: Any, low: float, high: float, *names: str) -> Iterator[Problem]:
    """Problems of fields that are not in a range; None is allowed.

    high: above every real job, so a larger value is a typing error.
    """
    for name in names:
        value = getattr(config, name)
        if value is not None and not low <= value <= high:
            fix = f"use {low} or more" if value < low else "use fewer zeros"
            yield Problem(name, "range", value, f"must be {low} to {high}", fix)
