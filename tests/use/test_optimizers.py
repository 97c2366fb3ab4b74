"""Optimizers by import path: they train and resume, or are refused before anything is written."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from forge_testing.runs import fit_on_ranks, make_job
from forge_train import Trainer, load_job
from forge_train.errors import ConfigError

ADAM = {"optimizer.name": "torch.optim:Adam", "checkpoint.every_steps": 3, "train.steps": 6}


@pytest.mark.parametrize("world", [1, 2])
def test_F114_a_torch_optimizer_trains_and_resumes_with_the_same_bits(
    tmp_path: Path, world: int
) -> None:
    job = make_job(tmp_path)
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    ran = fit_on_ranks(world, job, **ADAM, **{"run.dir": str(straight)})
    assert {(one.code, one.step) for one in ran} == {(0, 6)}
    (resumed / "checkpoints").mkdir(parents=True)
    shutil.copy(straight / "config.toml", resumed)
    shutil.copytree(straight / "checkpoints/step-00000003", resumed / "checkpoints/step-00000003")
    again = fit_on_ranks(world, job, **ADAM, **{"run.dir": str(resumed)})
    for mine, theirs in zip(again, ran, strict=True):
        for name, value in theirs.weights.items():
            assert torch.equal(mine.weights[name], value), name


@pytest.mark.parametrize(
    ("name", "words"),
    [("torch.optim:LBFGS", "needs a closure"), ("adamww", "optimizer.name 'adamww' is unknown")],
)
def test_F114_refused_before_the_run_directory_exists(
    tmp_path: Path, name: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        Trainer(load_job(make_job(tmp_path), {"optimizer.name": name})).fit()
    assert not (tmp_path / "run").exists()
