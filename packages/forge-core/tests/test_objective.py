"""Objectives: sums that a function of model and batch returns, and what is counted and logged of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forge_core._shared.problems import ProblemError, WithProblems
from forge_core.loss.named import Objective
from forge_testing.problems import rejects

MODEL = nn.Identity()


class Stopped(WithProblems):
    """An error of a caller's own."""


def two(model: nn.Module, batch: Any, *, scale: float = 1.0) -> dict[str, Tensor]:
    return {"loss": torch.tensor(scale), "other": torch.tensor(3.0)}


def counted(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    return {"loss": torch.tensor(1.0)}


counted.count = lambda batch: 5  # type: ignore[attr-defined]


def no_sums(model: nn.Module, batch: Any) -> Any:
    return {"loss": torch.zeros(2)}


def named(name: str, options: dict[str, Any] | None = None, **more: Any) -> Objective:
    return Objective(f"{__name__}:{name}", options or {}, **more)


def test_the_first_sum_is_trained_and_the_others_are_columns() -> None:
    objective = named("two", {"scale": 2.0})
    assert objective(MODEL, None) == [2.0, 3.0]
    assert objective.columns([3.0]) == {"objective.other": 3.0}


def test_the_weight_of_labels_is_counted_unless_it_counts_itself() -> None:
    batch = SimpleNamespace(label_weight=4.0)
    assert named("two").count(batch) == 4.0
    assert named("counted").count(batch) == 5.0


@pytest.mark.parametrize("error", [ProblemError, Stopped])
def test_an_objective_that_is_no_sum_is_rejected(error: type[Any]) -> None:
    with rejects("train.objective", f"{__name__}:no_sums", "type", error):
        named("no_sums", error=error)(MODEL, None)


def test_options_that_it_does_not_take() -> None:
    with rejects("train.objective_options.scal", 2.0, "unknown_key"):
        named("two", {"scal": 2.0})
