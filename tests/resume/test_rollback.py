"""A run that meets a poisoned window goes back, leaves it out, and is the run that never saw it, bit for bit."""

from __future__ import annotations

import math
import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from forge_core import cross_entropy, flops_per_token
from forge_testing.extensions import smoothed
from forge_testing.problems import rejects
from forge_testing.runs import Fitted, assert_close, fit_on_ranks, make_job, together
from forge_train import Callback, ConfigError, Trainer, load_job, read_run

pytestmark = [pytest.mark.distributed, pytest.mark.lane("test")]

BATCH = 12
POISONED = range(75, 80)  # within step 7, whose batch is 72..83
WINDOW = (72, 83)
BACK = {
    "train__objective": f"{__name__}:poisoned",
    "resilience__nonfinite__action": "rollback",
    "resilience__nonfinite__max_in_a_row": 0,
}
SPIKE = {
    "train__objective": f"{__name__}:poisoned",
    "train__objective_options__factor": 100.0,
    "resilience__spike__action": "rollback",
    "resilience__spike__window": 5,
}


def poisoned(
    model: nn.Module, batch: Any, *, factor: float = math.inf, last: int = POISONED[-1]
) -> dict[str, torch.Tensor]:
    """The loss of rows, which is beyond all measure where one of them is poisoned."""
    ids = batch.instance_ids
    bad = ((ids >= POISONED[0]) & (ids <= last)).any()
    loss = smoothed(model, batch)["loss"]
    return {"loss": loss * torch.where(bad, factor, 1.0)}


class LeaveOut(Callback):
    """From the first step on."""

    first, last = WINDOW

    def on_start(self, trainer: Trainer) -> None:
        trainer.loader.skip(self.first, self.last)


class LeaveOutMore(LeaveOut):
    """Two batches before, too."""

    first = WINDOW[0] - 2 * BATCH


class Dies(Exception):
    pass


class DiesAfterRollback(Callback):
    """In step 8, before anything behind the rollback is saved."""

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.progress.policy.rollbacks and trainer.progress.step == 8:
            raise Dies


def rows(job: Path) -> dict[str, list]:
    metrics = read_run(job.parent / "run").metrics
    same = ("step", "loss", "val_loss", "grad_norm", "lr", "tokens", "instances", "skipped_steps")
    return {name: metrics[name] for name in same}


def events(job: Path, name: str) -> list[dict[str, Any]]:
    return [e for e in read_run(job.parent / "run").events if e["event"] == name]


def assert_same(got: list[Fitted], wanted: list[Fitted], job: Path, reference: Path) -> None:
    mine, theirs = together(got), together(wanted)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert rows(job) == rows(reference)


@pytest.mark.slow
@pytest.mark.parametrize("how", [BACK, SPIKE], ids=["nonfinite", "spike"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_poisoned_window_leaves_the_run_of_one_that_never_saw_it(
    tmp_path: Path, world: int, how: dict[str, Any]
) -> None:
    job, reference = make_job(tmp_path / "a"), make_job(tmp_path / "b")
    workers = {"data__num_workers": world - 1}  # of two ranks each has one
    found = fit_on_ranks(world, job, **how, **workers)
    assert [f.problems for f in found] == [()] * world
    wanted = fit_on_ranks(world, reference, LeaveOut, **how)
    assert_same(found, wanted, job, reference)
    (back,) = events(job, "rollback")
    assert (back["to_step"], back["bad_steps"], back["cause"]) == (
        6,
        [7, 7],
        "spike" if how is SPIKE else "nonfinite",
    )
    assert back["skipped_instances"] == [list(WINDOW)]
    assert events(reference, "rollback") == []


class LeaveOutOfPhase(LeaveOut):
    first = WINDOW[0] - BATCH


@pytest.mark.slow
def test_a_rollback_leaves_out_the_rows_of_a_step_of_its_phase(tmp_path: Path) -> None:
    """From the fourth step on with twice the rows, the poisoned ones in the fifth; back to before the phase."""
    job, reference = make_job(tmp_path / "a"), make_job(tmp_path / "b")
    phase = {"start_instance": 3 * BATCH, "global_batch": 2 * BATCH, "lr_multiplier": 0.5}
    how = {**BACK, **{f"data__phases__wide__{key}": value for key, value in phase.items()}}
    how |= {"train__steps": 8, "model__moe__num_experts": 4, "model__moe__top_k": 2}
    found = fit_on_ranks(2, job, **how)
    wanted = fit_on_ranks(2, reference, LeaveOutOfPhase, **how)
    assert_same(found, wanted, job, reference)
    (back,) = events(job, "rollback")
    assert (back["to_step"], back["bad_steps"]) == (3, [5, 5])
    assert back["skipped_instances"] == [[LeaveOutOfPhase.first, WINDOW[1]]]
    assert [(e["step"], e["name"]) for e in events(job, "phase")] == [(4, "wide")]


SHORTER = """
[model.moe]
num_experts = 4
[data.phases.short]
start_instance = 84
seq_len = 16
global_batch = 20
"""


def test_F206_F207_rows_and_length_after_a_rollback_between_rows(tmp_path: Path) -> None:
    """Rows every 4 steps, checkpoints every 3, step 7 goes back to step 6; then rows of another length, up to 4600 tokens."""
    keys = {name.replace("__", "."): value for name, value in BACK.items()}
    keys |= {"metrics.every_steps": 4, "train.steps": None, "train.tokens": 4600, "eval.every_steps": 0,
             "sample.max_new_tokens": 0, "metrics.console": "off"}  # fmt: skip
    found = []
    for name, callbacks in (("a", []), ("b", [LeaveOut()])):
        job = make_job(tmp_path / name, SHORTER)
        job.write_text(job.read_text().replace("steps = 12\n", ""))
        trainer = Trainer(
            load_job(job, {k: v for k, v in keys.items() if v is not None}), callbacks
        )
        trainer.fit()
        per_token = {n: flops_per_token(trainer.model, n) for n in (32, 16)}
        metrics = read_run(tmp_path / name / "run").metrics
        found.append({n: v for n, v in metrics.items() if n.startswith("moe.") or n in ("step", "skipped_steps", "tokens", "flops")})  # fmt: skip
    assert found[0] == found[1]
    long, short = 6 * BATCH * 32, 20 * 16  # tokens of the six long steps, and of a short one
    steps = 6 + -(-(4600 - long) // short)
    assert found[0]["step"] == [4, 8, 12, 14]
    assert (trainer.total_steps, found[0]["tokens"][-1]) == (steps, long + (steps - 6) * short)
    wanted = long * per_token[32] + (found[0]["tokens"][-1] - long) * per_token[16]
    assert found[0]["flops"][-1] == pytest.approx(wanted, rel=1e-12)


class StopAt(Callback):
    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.progress.step == 9:
            os.kill(os.getpid(), signal.SIGTERM)


def test_F206_the_row_after_a_resume_counts_the_steps_before_it(tmp_path: Path) -> None:
    keys = {name.replace("__", "."): value for name, value in BACK.items()}
    keys |= {"resilience.nonfinite.action": "skip", "resilience.nonfinite.max_in_a_row": 1, "metrics.every_steps": 6,
             "eval.every_steps": 0, "sample.max_new_tokens": 0, "metrics.console": "off",
             "model.moe.num_experts": 4, "model.moe.bias_update_rate": 1e-2}  # fmt: skip
    found = []
    for name, lives in (("a", [[StopAt()], []]), ("b", [[]])):
        job = make_job(tmp_path / name)
        for callbacks in lives:
            Trainer(load_job(job, keys), callbacks).fit()
        metrics = read_run(tmp_path / name / "run").metrics
        found.append({n: v for n, v in metrics.items() if n.startswith("moe.") or n in ("step", "loss", "skipped_steps")})  # fmt: skip
    assert found[0] == found[1]
    assert (found[0]["step"], found[0]["skipped_steps"]) == ([6, 12], [0, 1])


MOE = {"model__moe__num_experts": 4, "model__moe__top_k": 2, "model__moe__bias_update_rate": 1e-3}


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        {"parallel__pp": 2, "model__num_layers": 2, "sample__max_new_tokens": 0},
        {"parallel__cp": 2, "sample__max_new_tokens": 0},
        {"parallel__ep": 2, **MOE},
    ],
    ids=["pp", "cp", "ep"],
)
def test_in_each_layout_all_ranks_go_back_alike(tmp_path: Path, layout: dict[str, Any]) -> None:
    job, reference = make_job(tmp_path / "a"), make_job(tmp_path / "b")
    stream = Trainer(load_job(job)).loader.stream
    row = stream.arrays(numpy.array([POISONED[0]]))["labels"][0, :8].tolist()
    how = {
        "train__loss": f"{__name__}:poisoned_row",
        "train__loss_options__row": row,
        "resilience__nonfinite__action": "rollback",
        "resilience__nonfinite__max_in_a_row": 0,
        **layout,
    }
    found = fit_on_ranks(2, job, **how)
    assert [f.problems for f in found] == [(), ()]
    wanted = fit_on_ranks(2, reference, LeaveOut, **how)
    assert_same(found, wanted, job, reference)
    assert [e["bad_steps"] for e in events(job, "rollback")] == [[7, 7]]


def poisoned_row(
    logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None, *, row: list[int]
) -> torch.Tensor:
    """The loss of tokens, beyond all measure where a row begins with these labels."""
    bad = (labels[:, : len(row)] == torch.tensor(row)).all(1).any()
    return cross_entropy(logits, labels, weights=weights).sum * torch.where(bad, math.inf, 1.0)


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_rows_are_read_late_and_saves_first_so_nothing_bad_is_saved(tmp_path: Path) -> None:
    """With a row every 12 steps the bad step is found by the save of step 9, and goes back to 6."""
    job, reference = make_job(tmp_path / "a"), make_job(tmp_path / "b")
    late = {**BACK, "metrics__every_steps": 12, "eval__every_steps": 12}
    found = fit_on_ranks(1, job, **late)
    assert_same(found, fit_on_ranks(1, reference, LeaveOut, **late), job, reference)
    (back,) = events(job, "rollback")
    assert (back["step"], back["to_step"], back["bad_steps"]) == (9, 6, [7, 7])


@pytest.mark.slow
def test_batches_before_the_bad_ones_are_left_out_and_checkpoints_among_them_removed(
    tmp_path: Path,
) -> None:
    job, reference = make_job(tmp_path / "a"), make_job(tmp_path / "b")
    more = {**BACK, "resilience__rollback__batches_before": 2}
    found = fit_on_ranks(2, job, **more)
    assert_same(found, fit_on_ranks(2, reference, LeaveOutMore, **more), job, reference)
    (back,) = events(job, "rollback")
    assert (back["to_step"], back["skipped_instances"]) == (3, [[48, 83]])
    assert [e["step"] for e in events(job, "save")] == [0, 3, 6, 6, 9, 12]


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_windows_that_overlap_a_checkpoint_and_each_other_are_left_out_after_it(
    tmp_path: Path,
) -> None:
    """Both reach back to step 6, which the only checkpoint holds already."""
    job, reference = make_job(tmp_path / "a"), make_job(tmp_path / "b")
    few = {"checkpoint__every_steps": 6, "checkpoint__keep_last": 1, **BACK}
    few |= {"resilience__rollback__batches_before": 1, "train__objective_options__last": 90}
    found = fit_on_ranks(1, job, **few)
    assert_same(found, fit_on_ranks(1, reference, LeaveOutTwo, **few), job, reference)
    backs = [(e["to_step"], e["skipped_instances"]) for e in events(job, "rollback")]
    assert backs == [(6, [[72, 83]]), (6, [[72, 95]])]


class LeaveOutTwo(LeaveOut):
    last = WINDOW[1] + BATCH


class Hears(Callback):
    """Of a rollback, with the steps that the run is at."""

    def on_rollback(self, trainer: Trainer, step: int) -> None:
        with (trainer.paths.path / f"back-{trainer.meshes.rank}").open("a") as file:
            file.write(f"{step} {trainer.progress.step}\n")


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_before_the_first_interval_the_run_goes_back_to_its_initial_state(tmp_path: Path) -> None:
    """F181: callbacks of all ranks hear of it."""
    job, reference = make_job(tmp_path / "a"), make_job(tmp_path / "b")
    rare = {**BACK, "checkpoint__every_steps": 0}
    found = fit_on_ranks(2, job, Hears, **rare)
    assert [(tmp_path / f"a/run/back-{rank}").read_text() for rank in (0, 1)] == ["0 0\n"] * 2
    assert_same(found, fit_on_ranks(2, reference, LeaveOut, **rare), job, reference)
    assert [e["to_step"] for e in events(job, "rollback")] == [0]


@pytest.mark.slow
def test_a_kill_after_the_rollback_comes_to_the_same_run(tmp_path: Path) -> None:
    job, reference = make_job(tmp_path / "a"), make_job(tmp_path / "b")
    flat = {key.replace("__", "."): value for key, value in BACK.items()}
    with pytest.raises(Dies):
        Trainer(load_job(job, {"metrics.console": "off", **flat}), [DiesAfterRollback()]).fit()
    found = fit_on_ranks(1, job, **BACK)
    assert_same(found, fit_on_ranks(1, reference, LeaveOut, **BACK), job, reference)
    assert [e["rollbacks"] for e in events(job, "rollback")] == [1, 1]


@pytest.mark.slow
def test_saved_after_a_rollback_and_resumed_on_other_ranks(tmp_path: Path) -> None:
    job, reference = make_job(tmp_path / "a"), make_job(tmp_path / "b")
    stopped = fit_on_ranks(2, job, StopAt10, **BACK)
    assert [f.code for f in stopped] == [75, 75]
    found = fit_on_ranks(3, job, **BACK)
    wanted = fit_on_ranks(1, reference, LeaveOut, **BACK)
    assert rows(job)["instances"] == rows(reference)["instances"]
    assert_close(together(found), together(wanted))
    assert len(events(job, "rollback")) == 1


class StopAt10(Callback):
    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.progress.step == 10:
            os.kill(os.getpid(), signal.SIGTERM)


def test_keys_of_a_rollback_without_one_are_rejected(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    with rejects("resilience.rollback", ..., "requires", ConfigError):
        load_job(job, {"resilience.rollback.batches_before": 3})


@pytest.mark.slow
@pytest.mark.parametrize("how", [BACK, SPIKE], ids=["nonfinite", "spike"])
def test_F36_more_rollbacks_than_allowed_end_with_76(tmp_path: Path, how: dict[str, Any]) -> None:
    job = make_job(tmp_path)
    endless = {**how, "train__objective_options__last": 10**6}
    found = fit_on_ranks(2, job, **endless)
    assert [f.code for f in found] == [76, 76]
    assert "(resilience.rollback.max_rollbacks 2)" in found[0].problems[0]
    backs = events(job, "rollback")
    assert [e["skipped_instances"] for e in backs] == [[[72, 83]], [[72, 95]]]
    again = fit_on_ranks(2, job, **endless)
    assert again[0].code == 76, "from the same checkpoint, to the same end"


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_each_rollback_lowers_the_learning_rate(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    fit_on_ranks(1, job, **BACK, resilience__rollback__lr_factor=0.5)
    whole = make_job(tmp_path / "whole")
    fit_on_ranks(1, whole)
    mine, plain = rows(job)["lr"], rows(whole)["lr"]
    assert mine[:6] == plain[:6]
    assert mine[6:] == [0.5 * lr for lr in plain[6:]]


class StopAt7(Callback):
    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.progress.step == 6:  # the stop is agreed in step 7, a bad one
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
def test_F35_a_skipped_step_is_a_step(tmp_path: Path) -> None:
    """Schedule, data, rows, evaluation, saves and stops go on as in a run without it."""
    job, plain = make_job(tmp_path), make_job(tmp_path / "plain")
    skip = {
        **BACK,
        "resilience__nonfinite__action": "skip",
        "resilience__nonfinite__max_in_a_row": 2,
        "checkpoint__every_steps": 7,
        "eval__every_steps": 7,
    }
    stopped = fit_on_ranks(2, job, StopAt7, **skip)
    assert [(f.code, f.step) for f in stopped] == [(75, 7)] * 2
    assert [f.code for f in fit_on_ranks(2, job, **skip)] == [0, 0]
    healthy = {"train__objective": BACK["train__objective"], "train__objective_options__last": 0}
    fit_on_ranks(2, plain, eval__every_steps=7, **healthy)
    mine, theirs = rows(job), rows(plain)
    for name in ("step", "lr", "tokens", "instances"):
        assert mine[name] == theirs[name], name
    assert mine["loss"][:6] == theirs["loss"][:6]
    assert [step for step, bad in zip(mine["step"], mine["skipped_steps"]) if bad] == [7]
    assert mine["val_loss"][6] is not None
    assert [e["step"] for e in events(job, "save")] == [7, 12]


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.parametrize("action", ["skip", "stop"])
def test_a_spike_is_skipped_or_ends_the_run(tmp_path: Path, action: str) -> None:
    job = make_job(tmp_path)
    found = fit_on_ranks(2, job, **{**SPIKE, "resilience__spike__action": action})
    if action == "stop":
        assert [f.code for f in found] == [76, 76]
        said = r"resilience\.spike\.action 'stop'.*\b6 .*\b5 "
        assert re.search(said, found[0].problems[0])
        return
    assert [f.code for f in found] == [0, 0]
    assert [(e["step"], e["spikes"]) for e in events(job, "spike")] == [(7, 1)]
    assert rows(job)["skipped_steps"] == [0] * 6 + [1] + [0] * 5
