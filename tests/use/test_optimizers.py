"""Optimizers by import path: they train and resume, or are refused before anything is written."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from forge_testing.problems import rejects
from forge_testing.runs import assert_close, fit_on_ranks, make_job, together
from forge_train import Trainer, load_job
from forge_train.errors import ConfigError

pytestmark = pytest.mark.lane("test")

ADAM = {"optimizer.name": "torch.optim:Adam", "checkpoint.every_steps": 3, "train.steps": 6}


@pytest.mark.slow
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


def test_a_configuration_that_was_written_gives_another_name_its_own_betas(tmp_path: Path) -> None:
    written = tmp_path / "resolved.toml"
    written.write_text(load_job(make_job(tmp_path)).to_toml())
    lion = load_job(written, {"optimizer.name": "lion", "optimizer.eps": 1e-8}).config.optimizer
    assert lion.resolved_betas == (0.9, 0.99)


BY_NAME = {"checkpoint.every_steps": 3, "train.steps": 6, "optimizer.lr": 1e-3}
MUON = {
    **BY_NAME,
    "model.num_layers": 2,
    "optimizer.name": "muon",
    "optimizer.muon.ns_dtype": "fp32",
}
LION = {**BY_NAME, "optimizer.name": "lion", "optimizer.eps": 1e-8}


def go_on(saved: Path, folder: Path) -> str:
    """A run directory that stands at step 3 of `saved`."""
    (folder / "checkpoints").mkdir(parents=True)
    shutil.copy(saved / "config.toml", folder)
    shutil.copytree(saved / "checkpoints/step-00000003", folder / "checkpoints/step-00000003")
    return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize("keys", [MUON, LION], ids=lambda keys: keys["optimizer.name"])
def test_F32_an_optimizer_of_forge_resumes_with_the_same_bits(
    tmp_path: Path, keys: dict[str, object]
) -> None:
    job, straight = make_job(tmp_path), tmp_path / "straight"
    wanted = together(fit_on_ranks(2, job, **keys, **{"run.dir": str(straight)}))
    again = fit_on_ranks(2, job, **keys, **{"run.dir": go_on(straight, tmp_path / "resumed")})
    got = together(again)
    assert all(torch.equal(got[name], value) for name, value in wanted.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [{"parallel.tp": 2}, {"parallel.pp": 2, "train.micro_batch": 3}], ids=str
)
def test_muon_goes_on_in_another_layout(tmp_path: Path, layout: dict[str, object]) -> None:
    job, straight = make_job(tmp_path), tmp_path / "straight"
    wanted = together(fit_on_ranks(2, job, **MUON, **{"run.dir": str(straight)}))
    folder = go_on(straight, tmp_path / "moved")
    got = together(fit_on_ranks(2, job, **MUON, **layout, **{"run.dir": folder}))
    assert any(name.endswith("momentum_buffer") for name in got)
    assert_close(got, wanted)


@pytest.mark.parametrize(
    ("name", "code"), [("torch.optim:LBFGS", "closure"), ("adamww", "unknown")]
)
def test_F114_errors_come_before_the_run_directory_exists(
    tmp_path: Path, name: str, code: str
) -> None:
    with rejects("optimizer.name", name, code, ConfigError):
        Trainer(load_job(make_job(tmp_path), {"optimizer.name": name})).fit()
    assert not (tmp_path / "run").exists()
