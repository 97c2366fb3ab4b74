"""examples/train_by_hand.py: a loop of the packages alone has the losses of the runner, also where it goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from forge_train import Trainer, load_job, read_run

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_its_rows_are_those_of_the_runner_bit_by_bit(tmp_path: Path) -> None:
    script = ROOT / "examples/train_by_hand.py"
    assert len(script.read_text().splitlines()) <= 150
    assert "forge_train" not in script.read_text()
    for steps in (6, 12):
        command = [sys.executable, str(script), str(tmp_path / "by_hand"), "--steps", str(steps)]
        subprocess.run(command, check=True, cwd=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "by_hand/metrics.jsonl").open()]
    assert [row["step"] for row in rows] == [6, 10, 12]

    flags = {"run.dir": str(tmp_path / "runner"), "metrics.every_steps": 1}
    config = ROOT / "apps/train/configs/debug.toml"
    Trainer(load_job(str(config), flags), until=12, saves=False, evaluates=False).fit()
    metrics = read_run(tmp_path / "runner").metrics
    for row in rows:
        at = metrics["step"].index(row["step"])
        assert {name: metrics[name][at] for name in row} == row
