"""Windows that are no windows, or that a run never comes to."""

from __future__ import annotations

from typing import Any

import pytest

from forge_parallel._shared.problems import ProblemError
from forge_parallel.profile.config import ProfileConfig
from forge_testing.problems import assert_problem, rejects

pytestmark = pytest.mark.lane("test")


@pytest.mark.parametrize(
    ("keys", "total", "key", "value", "code"),
    [
        ({"start_step": 4}, 5, "start_step", 4, "window"),
        ({"ranks": (0, 3)}, 50, "ranks", [3], "world"),
    ],
)
def test_a_window_of_the_profiler_is_within_the_run(
    keys: dict[str, Any], total: int, key: str, value: Any, code: str
) -> None:
    config = ProfileConfig(num_steps=3, **keys)
    assert_problem(ProblemError(config.run_problems(2, total)), key, value, code)
    assert not list(config.run_problems(4, 99))


def test_ranks_are_numbers_of_ranks() -> None:
    with rejects("ranks", [-1], "range"):
        ProfileConfig(ranks=(-1,))
