"""Commands of other packages beside those of the runner: `forge-data prepare` and then a run, `forge-train ckpt`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from forge_testing import forge_train, write_job
from forge_train import read_run


@pytest.mark.slow
def test_own_text_takes_two_lines(tmp_path: Path) -> None:
    """The two commands that the README gives, with the tiny job instead of the debug one."""
    (tmp_path / "texts").mkdir()
    for i in range(6):
        (tmp_path / f"texts/{i}.txt").write_text(f"text number {i} says something. " * 40)
    prepare = [sys.executable, "-m", "forge_data", "prepare", "texts", "--output", "tokens/mine"]
    made = subprocess.run(
        [*prepare, "--validation_every", "3"], cwd=tmp_path, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    name = "--data.sources.text."
    done = forge_train(
        "run",
        write_job(tmp_path),
        f"{name}name",
        "tokens",
        f"{name}path",
        "tokens/mine",
        cwd=tmp_path,
    )
    assert done.code == 0, done.err
    run = read_run(tmp_path / "run")
    assert run.config["data"]["validation"]["split"] == "validation"
    assert run.metrics["val_loss"][-1] < 5.6


@pytest.mark.slow
def test_command_lines_of_packages_are_verbs(tmp_path: Path) -> None:
    assert forge_train("run", write_job(tmp_path)).code == 0
    listed = forge_train("ckpt", "ls", tmp_path / "run/checkpoints")
    assert listed.code == 0, listed.err
    assert "12" in listed.out
    assert forge_train("ckpt", "verify", tmp_path / "run/checkpoints").code == 0
    helped = forge_train("--help")
    assert "ckpt" in helped.out
    assert "data" in helped.out
    assert forge_train("data", "inspect", tmp_path / "nothing").code in (65, 78)
