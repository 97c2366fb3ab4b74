"""Multi-token prediction in the runner: a column of its own, the same loss, every layout, and no trace in exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from forge_testing import write_job
from forge_testing.runs import assert_close, fit_alone, fit_on_ranks, make_job, together
from forge_train import ConfigError, load_job, load_trained, read_run
from forge_train.hf.exporting import export_run

MTP: dict[str, Any] = {"model.mtp.num_modules": 2, "model.mtp.weight": 0.4}
SHORT = {**MTP, "train.steps": 6, "eval.every_steps": 0, "sample.max_new_tokens": 0}
MUP = {"model.parametrization": "mup", "model.mup.base_dim": 8, "model.mup.base_num_layers": 1}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp": (2, {}),
    "cp": (2, {"parallel.cp": 2}),
    "tp": (2, {"parallel.tp": 2, "model.vocab_size": 258}),
    "pp": (2, {"parallel.pp": 2, "train.micro_batch": 3, "model.num_layers": 2}),
    "mup": (2, MUP),
    "mup_pp": (2, {**MUP, "parallel.pp": 2, "train.micro_batch": 3, "model.num_layers": 2}),
    "interleaved": (
        2,
        {
            **{"parallel.pp": 2, "train.micro_batch": 3, "model.num_layers": 4},
            **{"parallel.pp_schedule": "interleaved_1f1b", "train.cross_entropy.z_loss": 1e-3},
        },
    ),
}


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
@pytest.mark.distributed
def test_a_loss_of_several_sums_runs_where_the_backward_is_halved(tmp_path: Path) -> None:
    """Without modules: a view of the sums could not be detached in place."""
    keys = {key: value for key, value in SHORT.items() if key not in MTP}
    keys |= {"model.num_layers": 4, "train.cross_entropy.z_loss": 1e-3, "train.micro_batch": 3}
    alone = fit_alone(make_job(tmp_path / "alone"), **keys)
    keys |= {"parallel.pp": 2, "parallel.pp_schedule": "interleaved_zero_bubble"}
    flat = {key.replace(".", "__"): value for key, value in keys.items()}
    done = fit_on_ranks(2, make_job(tmp_path / "ranks"), **flat)
    assert [rank.problems for rank in done] == [()] * 2
    assert_close(together(done), alone.weights)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_equal_one_process(tmp_path: Path, layout: str) -> None:
    ranks, options = LAYOUTS[layout]
    alone_options = {k: v for k, v in options.items() if not k.startswith("parallel.")}
    alone = fit_alone(make_job(tmp_path / "alone"), **SHORT, **alone_options)
    flat = {k.replace(".", "__"): v for k, v in {**SHORT, **options}.items()}
    done = fit_on_ranks(ranks, make_job(tmp_path / "ranks"), **flat)
    assert [rank.problems for rank in done] == [()] * ranks
    assert_close(together(done), alone.weights)
    wanted, got = (read_run(tmp_path / name / "run").metrics for name in ("alone", "ranks"))
    for name in ("loss", "loss.mtp"):
        assert got[name] == pytest.approx(wanted[name], rel=1e-5), name


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
    assert "check: largest difference of logits" in said
    assert "left out, as transformers has no place for it: mtp (2)" in said


def test_its_weight_may_change_within_a_run(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    fit_alone(job, **{**SHORT, "train.steps": 3})
    fit_alone(job, **{**SHORT, "model.mtp.weight": 0.1})
    changed = [e["changed"] for e in read_run(tmp_path / "run").events if e["event"] == "resume"]
    assert changed[0]["model.mtp.weight"] == [0.4, 0.1]
    with pytest.raises(ConfigError, match=r"model\.mtp\.num_modules was 2 .* must stay"):
        fit_alone(job, **{**SHORT, "train.steps": 7, "model.mtp.num_modules": 1})


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"model.moe.num_experts": 4}, "its blocks are dense"),
        ({"train.objective": "forge_testing.parts:smoothed"}, "computes its own; use one of them"),
        (
            {"parallel.pp": 2, "parallel.pp_schedule": "zbv_zero_bubble", "model.num_layers": 4},
            "pp_schedule 'zbv_zero_bubble' halves the backward",
        ),
    ],
)
def test_what_it_does_not_go_with_is_refused(
    tmp_path: Path, keys: dict[str, Any], words: str
) -> None:
    from forge_train import Trainer

    with pytest.raises(ConfigError, match=words):
        Trainer(load_job(write_job(tmp_path), {**MTP, **keys})).fit()
