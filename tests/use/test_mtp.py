"""Multi-token prediction in the runner: a column of its own, the same loss, resumed, and no trace in exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from forge_testing import write_job
from forge_testing.problems import rejects
from forge_testing.runs import fit_alone, make_job
from forge_train import ConfigError, load_job, load_trained, read_run
from forge_train.hf.exporting import export_run

pytestmark = pytest.mark.lane("test")

MTP: dict[str, Any] = {"model.mtp.num_modules": 2, "model.mtp.weight": 0.4}
SHORT = {**MTP, "train.steps": 6, "eval.every_steps": 0, "sample.max_new_tokens": 0}


@pytest.mark.slow
def test_the_first_loss_is_that_without_it_and_it_has_a_column(tmp_path: Path) -> None:
    plain = {key: value for key, value in SHORT.items() if key not in MTP}
    fit_alone(make_job(tmp_path / "plain"), **plain)
    ahead = fit_alone(make_job(tmp_path / "ahead"), **SHORT)
    rows = [read_run(tmp_path / name / "run").metrics for name in ("plain", "ahead")]
    assert rows[0]["loss"][0] == rows[1]["loss"][0]
    assert rows[0]["loss"][1:] != rows[1]["loss"][1:]
    assert "loss.mtp" not in rows[0]
    # about the loss of a uniform guess; labels near the end of a document are left out of the mean
    assert 0.6 * rows[1]["loss"][0] < rows[1]["loss.mtp"][0] < 1.1 * rows[1]["loss"][0]
    assert any(name.startswith("mtp.1.block.") for name in ahead.weights)


@pytest.mark.slow
def test_a_run_that_stops_and_goes_on_has_the_same_bits_and_generates(tmp_path: Path) -> None:
    constant = {**SHORT, "schedule.name": "constant"}
    whole = fit_alone(make_job(tmp_path / "whole"), **constant)
    job = make_job(tmp_path / "parts")
    fit_alone(job, **{**constant, "train.steps": 3})
    parts = fit_alone(job, **constant)
    for name, value in whole.weights.items():
        assert torch.equal(parts.weights[name], value), name
    model = load_trained(tmp_path / "parts/run")[0]
    assert model(torch.arange(5)[None]).shape == (1, 5, 257)


def test_an_export_leaves_it_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    fit_alone(make_job(tmp_path), **SHORT)
    assert export_run(tmp_path / "run", tmp_path / "hf", check=True) == 0
    said = capsys.readouterr().out
    assert "\ncheck: " in said
    assert ": mtp (2)\n" in said


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_its_weight_may_change_within_a_run(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    fit_alone(job, **{**SHORT, "train.steps": 3})
    fit_alone(job, **{**SHORT, "model.mtp.weight": 0.1})
    changed = [e["changed"] for e in read_run(tmp_path / "run").events if e["event"] == "resume"]
    assert changed[0]["model.mtp.weight"] == [0.4, 0.1]
    with rejects("model.mtp.num_modules", 1, "fixed", ConfigError):
        fit_alone(job, **{**SHORT, "train.steps": 7, "model.mtp.num_modules": 1})


@pytest.mark.parametrize(
    ("keys", "key", "value", "code"),
    [
        ({"model.moe.num_experts": 4}, "model.mtp.num_modules", 2, "excludes"),
        (
            {"train.objective": "forge_testing.extensions:smoothed"},
            *("model.mtp.num_modules", 2, "excludes"),
        ),
        (
            {"parallel.pp": 2, "parallel.pp_schedule": "zbv_zero_bubble", "model.num_layers": 4},
            *("parallel.pp_schedule", "zbv_zero_bubble", "ahead"),
        ),
    ],
)
def test_keys_that_conflict_with_it_are_rejected(
    tmp_path: Path, keys: dict[str, Any], key: str, value: Any, code: str
) -> None:
    from forge_train import Trainer

    with rejects(key, value, code, ConfigError):
        Trainer(load_job(write_job(tmp_path), {**MTP, **keys})).fit()
