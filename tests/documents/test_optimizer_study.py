"""The study of optimizers runs, and its page is what its rows say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks import optimizer_study

pytestmark = pytest.mark.lane("test")

DOCS = Path(optimizer_study.ROOT) / "docs"


@pytest.mark.slow
def test_two_runs_of_few_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    few = {"adamw": ({"eval.sequences": 2, "eval.every_steps": 2}, (3e-3,))}
    monkeypatch.setattr(optimizer_study, "OPTIMIZERS", few)
    monkeypatch.setattr(optimizer_study, "SCHEDULES", ("wsd",))
    flags = ["--seeds", "1", "--steps", "30", "--folder", str(tmp_path)]
    optimizer_study.main(flags)
    rows = json.loads((tmp_path / "data/optimizers.json").read_text())
    assert [row["seed"] for row in rows] == [optimizer_study.RATE_SEED, 0]
    assert [step for step, _ in rows[1]["curve"]] == list(range(2, 31, 2))
    assert rows[1]["val_loss"] < rows[1]["curve"][0][1]
    text = (tmp_path / "optimizers.md").read_text()
    assert f"| adamw | wsd | 0.003 | {rows[1]['val_loss']:.4f} | nan |" in text
    assert "adamw, lr 0.003" in (tmp_path / "optimizers.svg").read_text()
    before = (tmp_path / "data/optimizers.json").read_text()
    optimizer_study.main([*flags, "--resume"])
    assert (tmp_path / "data/optimizers.json").read_text() == before


def test_the_rate_that_is_compared_is_the_best_that_was_tried() -> None:
    seed = optimizer_study.RATE_SEED
    losses = {(0.1, seed): 2.0, (0.2, seed): 1.0, (0.3, seed): 3.0, (0.1, 0): 0.5}
    rows = [
        {"optimizer": "lion", "lr": lr, "seed": seed, "val_loss": loss}
        for (lr, seed), loss in losses.items()
    ]
    assert optimizer_study.best_rate(rows, "lion") == 0.2


@pytest.mark.skipif(not (DOCS / "data/optimizers.json").exists(), reason="no optimizers.json")
def test_the_page_is_that_of_its_rows() -> None:
    rows = json.loads((DOCS / "data/optimizers.json").read_text())
    assert (DOCS / "optimizers.md").read_text() == optimizer_study.page(rows), (
        "run: hatch run optimizers --page"
    )
