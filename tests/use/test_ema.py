"""An average of the weights in the runner: evaluated and saved in their place, and trained on with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from forge_testing import write_job
from forge_testing.problems import rejects
from forge_testing.runs import assert_close, fit_alone, fit_on_ranks, make_job, together
from forge_train import Callback, ConfigError, Trainer, load_job, load_trained, read_run

DECAY, STEPS = 0.7, 10
KEYS: dict[str, Any] = {
    "optimizer.ema.decay": DECAY,
    "optimizer.lr": 1e-2,
    "schedule.name": "constant",
}
SHORT = {**KEYS, "train.steps": STEPS, "eval.every_steps": 0, "sample.max_new_tokens": 0}


def test_what_is_saved_is_the_average_of_the_weights_of_an_undisturbed_run(tmp_path: Path) -> None:
    averages: dict[str, torch.Tensor] = {}

    class Average(Callback):
        def on_step_end(self, trainer: Trainer) -> None:
            before = trainer.progress.step - 1
            decay = min(DECAY, before / (before + 9))
            for name, p in trainer.model.named_parameters():
                old = averages.get(name, p).detach().double()
                averages[name] = decay * old + (1 - decay) * p.detach().double()

    plain = {**SHORT, "optimizer.ema.decay": "none"}
    trainer = Trainer(load_job(make_job(tmp_path / "plain"), plain), [Average()])
    trainer.fit()
    weights = fit_alone(make_job(tmp_path / "average"), **SHORT).weights
    for name, average in averages.items():
        assert (weights[name] - average).abs().max() <= 1e-6 * average.abs().max(), name
    rows = [read_run(tmp_path / n / "run").metrics["loss"] for n in ("plain", "average")]
    assert rows[0] == rows[1]  # it trains as without
    away = max(
        float((p.detach() - weights[n]).abs().max()) for n, p in trainer.model.named_parameters()
    )
    assert away > 1e-3


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_a_run_that_stops_and_goes_on_has_the_same_bits(tmp_path: Path) -> None:
    whole = fit_alone(make_job(tmp_path / "whole"), **{**SHORT, "eval.every_steps": 3})
    job = make_job(tmp_path / "parts")
    fit_alone(job, **{**SHORT, "train.steps": 4})
    parts = fit_alone(job, **SHORT)
    for name, value in whole.weights.items():
        assert torch.equal(parts.weights[name], value), name
    rows = [read_run(tmp_path / n / "run").metrics["loss"] for n in ("parts", "whole")]
    assert rows[0] == rows[1]


def test_generation_and_validation_read_the_average(tmp_path: Path) -> None:
    trainer = Trainer(load_job(write_job(tmp_path), KEYS))
    trainer.fit()
    loaded = load_trained(tmp_path / "run")[0]
    with trainer.evaluation_point():
        for a, b in zip(loaded.parameters(), trainer.model.parameters(), strict=True):
            assert torch.equal(a, b)
    slots = next(iter(trainer.optimizer.named_state().values()))
    assert {"exp_avg", "trained", "ema_updates"} <= slots.keys()


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_an_average_neither_begins_nor_ends_within_a_run(tmp_path: Path) -> None:
    short = {**SHORT, "train.steps": 2, "metrics.console": "off"}
    off = {**short, "optimizer.ema.decay": "none"}
    jobs = {name: make_job(tmp_path / name) for name in ("on", "off")}
    for name, keys, others in (("on", short, off), ("off", off, short)):
        fit_alone(jobs[name], **keys)
        now = "none" if name == "on" else 0.7
        with rejects("optimizer.ema.decay", now, "average", ConfigError):
            fit_alone(jobs[name], **{**others, "train.steps": 3})
    fit_alone(jobs["on"], **{**short, "train.steps": 3, "optimizer.ema.decay": 0.8})
    fork = {**off, "init.from": str(tmp_path / "on/run")}
    with rejects("optimizer.ema.decay", ..., "missing", ConfigError):
        fit_alone(make_job(tmp_path / "fork"), **{**fork, "init.keep": ["weights", "optimizer"]})
    fit_alone(make_job(tmp_path / "fork"), **fork)
    fit_alone(make_job(tmp_path / "back"), **{**short, "init.from": str(tmp_path / "fork/run")})


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_in_bf16_look_at_it_and_equal_two_that_do_not(tmp_path: Path) -> None:
    """Weights that stay gathered after an evaluation would be those of the other point."""
    found = []
    for name, every in (("plain", 0), ("looked", 1)):
        keys = {**SHORT, "parallel.precision": "bf16", "eval.every_steps": every}
        flat = {key.replace(".", "__"): value for key, value in keys.items()}
        done = fit_on_ranks(2, make_job(tmp_path / name), **flat)
        assert [rank.problems for rank in done] == [(), ()]
        found.append(together(done))
    assert_close(found[1], found[0])
