"""Runs through phases with other rows and batches: after a kill, with a fault of a rank, and as they were planned."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from forge_data import Batch
from forge_testing import forge_train, kill_after_step, start
from forge_testing.problems import rejects
from forge_testing.runs import assert_same_bits, fit_alone, fit_on_ranks, make_job, saved_tensors
from forge_train import Callback, ConfigError, Trainer, load_job, read_run
from forge_train.report.planned import planned

pytestmark = pytest.mark.lane("test")

#: Rows of 32 tokens, 12 a step; 6 steps and a cut one of 8 rows, then rows of 48 tokens, then 24 of them a step.
PHASES = """
[data.phases.long]
start_tokens = 2560
seq_len = 48
lr_multiplier = 0.5
[data.phases.wide]
start_tokens = 4000
global_batch = 24
"""
QUIET: dict[str, Any] = {
    "metrics.console": "off",
    "sample.max_new_tokens": 0,
    "train.steps": 12,
    "model.max_seq_len": 48,
}
FLAGS = [part for key, value in QUIET.items() for part in (f"--{key}", str(value))]


def job_in(folder: Path) -> Path:
    return make_job(folder, PHASES)


def under(keys: dict[str, Any]) -> dict[str, Any]:
    return {key.replace(".", "__"): value for key, value in keys.items()}


class Seen(Callback):
    """The shape of each step's rows, the rate and the tokens."""

    def before_forward(self, step: int, batch: Batch) -> None:
        self.width = batch.tokens.size(1)

    def on_start(self, trainer: Trainer) -> None:
        self.shapes: list[tuple[int, int]] = []
        self.rates: list[float] = []
        self.tokens: list[int] = []

    def on_step_end(self, trainer: Trainer) -> None:
        self.shapes.append((trainer.loader.state_dict()["last_batch"], self.width))
        self.rates.append(trainer.optimizer.param_groups[0]["lr"])
        self.tokens.append(trainer.progress.tokens)


@pytest.mark.lane("quick")
def test_what_is_planned_is_what_the_run_does(tmp_path: Path) -> None:
    job, seen = load_job(job_in(tmp_path), QUIET | {"schedule.name": "cosine"}), Seen()
    Trainer(job, [seen]).fit()
    assert seen.shapes == [(12, 32)] * 6 + [(8, 32)] + [(12, 48)] * 3 + [(24, 48)] * 2
    plan = planned(job.config)
    assert plan.rates["others"] == seen.rates
    assert plan.tokens == [rows * length for rows, length in seen.shapes]
    assert seen.tokens[-1] == sum(plan.tokens)
    run = read_run(tmp_path / "run")
    events = [e for e in run.events if e["event"] == "phase"]
    assert [(e["step"], e["name"], e["seq_len"], e["global_batch"]) for e in events] == [
        (8, "long", 48, 12),
        (11, "wide", 48, 24),
    ]
    flops = [b - a for a, b in pairwise([0.0, *run.metrics["flops"]])]
    assert flops[8] / (12 * 48) > flops[0] / (12 * 32) == pytest.approx(flops[6] / (8 * 32))


def test_a_length_in_tokens_counts_those_of_phases(tmp_path: Path) -> None:
    tokens = {"train.tokens": 2560 + 3 * 576 + 1152 + 1}
    job = load_job(
        job_in(tmp_path), {k: v for k, v in QUIET.items() if k != "train.steps"} | tokens
    )
    assert Trainer(job).total_steps == 12


class BadDisk(Callback):
    """Rank 1 cannot read the second step of the phase."""

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.progress.step == 11 and trainer.meshes.rank == 1:

            def arrays(ids: Any) -> Any:
                raise OSError("the disk is gone")

            trainer.loader.stream.part_at(10**9).stream.arrays = arrays  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.distributed
def test_a_rank_without_data_in_a_phase_ends_all_in_the_same_step(tmp_path: Path) -> None:
    fitted = fit_on_ranks(2, job_in(tmp_path), BadDisk, **under(QUIET))
    assert [(f.code, f.step) for f in fitted] == [(65, 11)] * 2
    assert "rank 1: step 12: InvalidData" in fitted[0].problems[0]


@pytest.mark.slow
@pytest.mark.parametrize("step", [7, 11])
def test_killed_it_goes_on_with_the_same_bits(tmp_path: Path, step: int) -> None:
    job = job_in(tmp_path)
    flags = [*FLAGS, "--checkpoint.every_steps", "1", "--checkpoint.wait", "true"]
    kill_after_step(start("run", job, *flags), tmp_path / "run/metrics.jsonl", step)
    done = forge_train("run", job, *flags)
    assert done.code == 0, done.err
    fit_alone(job_in(tmp_path / "whole"), **QUIET)
    assert_same_bits(saved_tensors(tmp_path / "run"), saved_tensors(tmp_path / "whole/run"))


def test_the_start_lists_how_sequences_of_each_length_are_packed(tmp_path: Path) -> None:
    run = job_in(tmp_path)
    fit_alone(run, **QUIET | {"train.steps": 8, "data.packing.name": "best_fit"})
    (begun,) = [e for e in read_run(tmp_path / "run").events if e["event"] == "start"]
    assert {*begun["packing"]} == {"data", "long.data"}
    assert sum(line.startswith("phase long: ") for line in begun["data"]) == 1


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_explain_lists_where_phases_begin(tmp_path: Path) -> None:
    told = forge_train("explain", job_in(tmp_path), *FLAGS)
    assert told.code == 0, told.err
    assert "phase long: from step 8 (row 80, 2,560 tokens) on rate x 0.5, rows of 48" in told.out
    assert ", step 7 " in told.out
    assert "phase wide: from step 11 (row 116, 4,288 tokens) on rate x 1, global" in told.out


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"parallel.pp": 2, "model.num_layers": 2}, ("data.phases", ..., "pipeline")),
        (
            {"model.max_seq_len": 32},
            ("data.phases.long.seq_len", 48, "above_limit"),
        ),
        (
            {"train.micro_batch": 3, "data.phases.wide.global_batch": 22},
            ("data.phases.wide.global_batch", 22, "divides"),
        ),
        (
            {"data.phases.long.seq_len": 45, "parallel.cp": 2},
            ("data.seq_len", 45, "divides"),
        ),
    ],
)
def test_phases_that_a_layout_cannot_run_are_rejected(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    keys: dict[str, Any],
    problem: tuple[str, Any, str],
) -> None:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", **address}.items():
        monkeypatch.setenv(name, value)
    with rejects(*problem, ConfigError):
        Trainer(load_job(job_in(tmp_path), QUIET | keys))
