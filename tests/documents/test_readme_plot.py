"""The picture of the README is drawn from its record, and the record shows what the caption says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scripts import readme_plot

RECORD = json.loads(readme_plot.RECORD.read_text())


def test_the_plot_is_that_of_the_record(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    readme_plot.draw(RECORD, tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").read_text() == readme_plot.PICTURE.read_text()


def test_a_killed_run_has_the_losses_and_the_weights_of_one_that_was_not() -> None:
    calm = {step: loss for step, loss in RECORD["undisturbed"]}
    last, resumed = RECORD["killed"][-1][0], RECORD["resumed_from"]
    assert 0 < resumed < last < max(calm)
    for part in ("killed", "resumed"):
        assert RECORD[part]
        assert all(calm[step] == loss for step, loss in RECORD[part])
    assert RECORD["resumed"][0][0] <= last < RECORD["resumed"][-1][0] == max(calm)
    assert len(set(RECORD["weights"].values())) == 1
