"""The comparison at equal work: its rows are of equal FLOPs and data, and its page is that of its rows."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from tests.vlm.matched_loss import (
    LEARNT,
    MODELS,
    PAGE,
    RESULT,
    corpus,
    curve,
    matched,
    page,
    smooth,
)

pytestmark = pytest.mark.lane("test")


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_rows_are_a_digit_and_its_name() -> None:
    pytest.importorskip("sklearn")
    train, held = corpus()
    assert (tuple(train.shape), tuple(held.shape)) == ((1437, 76), (360, 76))
    for row in train[:50].tolist():
        assert sum(id >= 32 for id in row) == 64
        assert row.count(1) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_model_learns_both_modalities_at_the_flops_of_the_dense_one(name: str) -> None:
    pytest.importorskip("sklearn")
    row, dense = (curve(n, 0, 20) for n in (name, "joint_decoder"))
    assert row["flops_per_token"] == pytest.approx(dense["flops_per_token"], rel=0.01)
    for modality in LEARNT:
        losses = row[f"loss.{modality}"]
        assert losses[0] == pytest.approx(torch.tensor(48.0).log().item(), abs=0.1)
        assert losses[-1] < 0.95 * losses[0]


def test_the_fraction_of_work_is_that_of_the_first_mean_as_low() -> None:
    def row(steps: int, flops: int, *losses: float) -> dict[str, Any]:
        return {"flops_per_token": flops, "steps": steps, "loss.text": list(losses)}

    targets = [row(60, 100, 9, 8, 7, 6, 5, 4, 3), row(60, 100, 9, 8, 7, 6, 5, 4, 5)]  # 5.0, 5.4
    dense = row(90, 100, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0)
    assert smooth(dense["loss.text"]) == [7, 6, 5, 4, 3, 2]
    assert matched(dense, targets, "text") == 1.0
    assert matched({**dense, "flops_per_token": 150}, targets, "text") == pytest.approx(1.5)
    assert matched(row(90, 100, *[5.3] * 10), targets, "text") == math.inf
    assert matched(row(90, 100, *[5.0] * 10), targets, "text") == pytest.approx(40 / 60)


def test_the_page_is_that_of_its_rows() -> None:
    kept = json.loads(RESULT.read_text())
    assert {r["model"] for r in kept["rows"]} == MODELS.keys()
    assert {r["seed"] for r in kept["targets"]}.isdisjoint(r["seed"] for r in kept["rows"])
    written = PAGE.read_text()
    assert written == "\n".join(page(kept["targets"], kept["rows"])) + "\n"
