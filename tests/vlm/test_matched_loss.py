"""The comparison at equal work: its rows are of equal FLOPs and data, and its page is that of its rows."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tests.vlm.matched_loss import LEARNT, MODELS, RESULT, corpus, curve, matched, page


def test_rows_are_a_digit_and_its_name() -> None:
    pytest.importorskip("sklearn")
    train, held = corpus()
    assert (tuple(train.shape), tuple(held.shape)) == ((1437, 76), (360, 76))
    for row in train[:50].tolist():
        assert sum(id >= 32 for id in row) == 64
        assert row.count(1) == 1


@pytest.mark.parametrize("name", MODELS)
def test_a_model_learns_both_modalities_at_the_flops_of_the_dense_one(name: str) -> None:
    pytest.importorskip("sklearn")
    row, dense = (curve(n, 0, 20) for n in (name, "joint_decoder"))
    assert row["flops_per_token"] == pytest.approx(dense["flops_per_token"], rel=0.01)
    for modality in LEARNT:
        losses = row[f"loss.{modality}"]
        assert losses[0] == pytest.approx(torch.tensor(48.0).log().item(), abs=0.1)
        assert losses[-1] < 0.95 * losses[0]


def test_the_share_of_work_is_that_of_the_first_loss_as_low() -> None:
    dense: dict[str, Any] = {"flops_per_token": 100, "steps": 30, "loss.text": [4.0, 3.0, 2.0, 1.0]}
    row = {**dense, "flops_per_token": 150, "loss.text": [4.0, 2.0, 1.0, 0.5]}
    assert matched(row, dense, "text") == pytest.approx(20 / 30 * 1.5)
    assert matched(dense, dense, "text") == 1.0
    assert matched({**row, "loss.text": [4.0, 2.0, 1.5, 1.1]}, dense, "text") is None


def test_the_page_is_that_of_its_rows() -> None:
    rows = json.loads(RESULT.read_text())["rows"]
    assert {r["model"] for r in rows} == MODELS.keys()
    assert RESULT.with_suffix(".md").read_text() == "\n".join(page(rows)) + "\n"
