"""Pipeline schedules that halve the backward, and the torch that they need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

# They compute gradients of inputs and of weights apart; forge_parallel refuses them below torch 2.13.
HALVES_THE_BACKWARD = ("interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev")
_Params = type(pytest.param())


def schedules(values: Iterable[Any]) -> list[Any]:
    """Parameters of a test, of which those that name such a schedule need torch 2.13.

    A value is what `pytest.mark.parametrize` takes: the name of a schedule, a tuple that has one somewhere, or a
    `pytest.param`, whose marks stay. Ids are those that pytest gives without this function.

    Example: `@pytest.mark.parametrize(("schedule", "pp"), schedules([("1f1b", 2), ("dualpipev", 4)]))`.
    """
    return [_param(value) for value in values]


def marks(value: Any) -> list[Any]:
    """Marks of a parameter that stands for the value, such as the keys of a layout.

    Example: `[pytest.param(name, marks=marks(keys)) for name, keys in LAYOUTS.items()]`.
    """
    return [pytest.mark.needs_torch("2.13")] if _halves(value) else []


def _halves(value: Any) -> bool:
    if isinstance(value, Mapping):
        return _halves(list(value.values()))
    if isinstance(value, list | tuple):
        return any(_halves(part) for part in value)
    return isinstance(value, str) and value in HALVES_THE_BACKWARD


def _param(value: Any) -> Any:
    if isinstance(value, _Params):
        more = marks(list(value.values))
        return pytest.param(*value.values, marks=[*value.marks, *more], id=value.id)
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks(value))
