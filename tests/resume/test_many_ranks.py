"""Runs on several ranks: they decide together, and move.

Ranks are real gloo processes of the shared pool, each with a Trainer of its own; what needs a launcher,
a signal from outside or a kill runs the command itself.
"""

from __future__ import annotations

import io
import json
import os
import random
import re
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist

from forge_ckpt.rng import seed_process
from forge_parallel import Meshes, end_process_group
from forge_testing import RankError, forge_train, run_on_ranks, runs, start, wait_for_step
from forge_testing.faults import flip_bit, rank_pids, signal_at_random, signal_rank
from forge_testing.problems import rejects
from forge_train import Callback, ConfigError, Trainer, cli, load_job, load_trained, read_run

pytestmark = [pytest.mark.distributed, pytest.mark.lane("test")]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list], runs.Fitted]:
    """One process, undisturbed."""
    job = runs.make_job(tmp_path_factory.mktemp("alone"))
    fitted = runs.fit_reference(job)
    return runs.columns(job), fitted


# ---- stop, save and errors in the same step


class TermOnRank2(Callback):
    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.progress.step == 4 and trainer.meshes.rank == 2:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
def test_F59_a_signal_to_one_rank_stops_all_in_the_same_step(tmp_path: Path, alone: Any) -> None:
    job = runs.make_job(tmp_path)
    stopped = runs.fit_on_ranks(4, job, TermOnRank2, checkpoint__every_steps=0)
    assert [(f.code, f.step) for f in stopped] == [(75, 5)] * 4
    events = read_run(tmp_path / "run").events
    assert [e["event"] for e in events[-2:]] == ["save", "stop"]
    assert (events[-1]["signal"], events[-1]["rank"], events[-2]["step"]) == ("SIGTERM", 2, 5)
    assert [f.code for f in runs.fit_on_ranks(4, job)] == [0] * 4
    runs.assert_same_rows(runs.columns(job), alone[0])


class SaveFromRank1(Callback):
    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.progress.step == 4 and trainer.meshes.rank == 1:
            trainer.request_save()


@pytest.mark.slow
def test_one_rank_requests_a_save_and_all_save_the_next_step(tmp_path: Path) -> None:
    fitted = runs.fit_on_ranks(2, runs.make_job(tmp_path), SaveFromRank1, checkpoint__every_steps=0)
    assert [f.code for f in fitted] == [0, 0]
    events = read_run(tmp_path / "run").events
    assert [e["step"] for e in events if e["event"] == "save"] == [5, 12]


class BadDiskOnRank1(Callback):
    error: type[Exception] = OSError

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.progress.step == 4 and trainer.meshes.rank == 1:

            def arrays(ids: Any) -> Any:
                raise self.error("the disk is gone")

            trainer.loader.stream.arrays = arrays  # type: ignore[method-assign]


@pytest.mark.slow
def test_a_rank_without_data_ends_all_in_the_same_step(tmp_path: Path) -> None:
    fitted = runs.fit_on_ranks(4, runs.make_job(tmp_path), BadDiskOnRank1)
    assert [(f.code, f.step) for f in fitted] == [(65, 4)] * 4
    assert fitted[0].problems == fitted[1].problems
    assert "rank 1: step 5: InvalidData: instance " in fitted[0].problems[0]
    assert "OSError: the disk is gone" in fitted[0].problems[0]
    events = read_run(
        tmp_path / "run"
    ).events  # the save of step 4 may be committed after the fault
    (event,) = [e for e in events if e["event"] == "fault"]
    assert (event["rank"], event["step"], event["code"]) == (1, 4, 65)


class BadValidationOnRank1(Callback):
    error: type[Exception] = OSError

    def on_start(self, trainer: Trainer) -> None:
        if trainer.meshes.rank == 1:

            def arrays(ids: Any) -> Any:
                raise self.error("no such rows")

            trainer.run.evaluation.streams["validation"].arrays = arrays  # type: ignore[union-attr, method-assign]


class BadWeightsOnRank1(BadValidationOnRank1):
    error = ValueError  # what Batch says of weights below 0


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.parametrize("bad", [BadValidationOnRank1, BadWeightsOnRank1])
def test_a_rank_without_validation_data_ends_all_at_the_evaluation(
    tmp_path: Path, bad: type[BadValidationOnRank1]
) -> None:
    fitted = runs.fit_on_ranks(2, runs.make_job(tmp_path), bad)
    assert [(f.code, f.step) for f in fitted] == [(65, 6)] * 2
    for part in ("rank 1", "validation data", "no such rows"):
        assert part in fitted[0].problems[0]


class BugInValidationOnRank1(BadValidationOnRank1):
    error = TypeError


def ends_of_fit(job: Path) -> tuple[str, str]:
    """What a rank raises, whatever it is; the other need not have raised before for it to come."""
    try:
        fitted = runs.fit(job, {"metrics.console": "off"}, BugInValidationOnRank1)
    except Exception as error:
        return type(error).__name__, str(error)
    return str(fitted.code), fitted.problems[0]


@pytest.mark.lane("quick")
def test_a_mistake_in_a_users_validation_stream_ends_all_at_the_evaluation(tmp_path: Path) -> None:
    """The rank that made it raises it itself, with its trace; the others say whose it was."""
    other, made = run_on_ranks(2, ends_of_fit, runs.make_job(tmp_path), timeout=60)
    assert other == ("1", "rank 1: TypeError: no such rows")
    assert made == ("TypeError", "no such rows")


class Weighed(Callback):
    """Weights that are `each` on every label, from the first step on."""

    each = 1.0

    def on_start(self, trainer: Trainer) -> None:
        read = trainer.loader.stream.arrays

        def arrays(ids: Any) -> Any:
            found = read(ids)
            return {**found, "weights": numpy.full(found["labels"].shape, self.each, "float32")}

        trainer.loader.stream.arrays = arrays  # type: ignore[method-assign]


class BarelyWeighed(Weighed):
    each = 1e-44


class LightlyWeighed(Weighed):
    each = 1e-37


@pytest.mark.slow
def test_weights_of_labels_that_fp32_cannot_divide_by_end_all_ranks(tmp_path: Path) -> None:
    """The mean over labels of equal weight is that of labels without."""
    plain = runs.make_job(tmp_path / "plain")
    assert [f.code for f in runs.fit_on_ranks(2, plain, train__steps=2)] == [0, 0]
    light = runs.make_job(tmp_path / "light")
    assert [f.code for f in runs.fit_on_ranks(2, light, LightlyWeighed, train__steps=2)] == [0, 0]
    assert runs.columns(light)["loss"] == pytest.approx(runs.columns(plain)["loss"], rel=1e-5)
    assert runs.columns(light)["grad_norm"] == pytest.approx(
        runs.columns(plain)["grad_norm"], rel=1e-5
    )
    barely = runs.fit_on_ranks(2, runs.make_job(tmp_path / "barely"), BarelyWeighed, train__steps=2)
    assert [(f.code, f.step) for f in barely] == [(65, 0)] * 2
    assert re.search(r"step 1: .*\b1\.2e-38 .*\b3\.4e\+38\b", barely[0].problems[0])


class Peek(Callback):
    """Runs the model where a user would: for each logged row, after steps and evaluations."""

    def _look(self, trainer: Trainer) -> None:
        with torch.no_grad():
            trainer.model(torch.zeros(1, 8, dtype=torch.int64))

    def on_log(self, trainer: Trainer, row: Any) -> None:
        self._look(trainer)

    def on_step_end(self, trainer: Trainer) -> None:
        self._look(trainer)

    def on_evaluation(self, trainer: Trainer, name: str, result: float) -> None:
        self._look(trainer)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "precision"), [(2, "fp32"), (1, "bf16")])
def test_a_forward_between_steps_changes_no_number(
    tmp_path: Path, world: int, precision: str
) -> None:
    found = []
    for name, callback in (("plain", None), ("peek", Peek)):
        job = runs.make_job(tmp_path / name)
        fitted = runs.fit_on_ranks(world, job, callback, parallel__precision=precision)
        assert [f.code for f in fitted] == [0] * world
        found.append(runs.columns(job))
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_a_builder_that_gives_each_rank_another_model_is_rejected(tmp_path: Path) -> None:
    other = {"model__name": "forge_testing.models:by_rank", "sample__max_new_tokens": 0}
    text = runs.make_job(tmp_path).read_text()
    job = tmp_path / "imported.toml"
    job.write_text(text.replace("dim = 16\nnum_layers = 1\nnum_heads = 2\n", ""))
    refused = runs.fit_on_ranks(2, job, **other)
    assert [f.code for f in refused] == [78, 78]
    assert "model.name" in refused[0].problems[0]
    assert "[1]" in refused[0].problems[0]
    same = runs.fit_on_ranks(
        2, job, **{**other, "model__name": "forge_testing.models:random_weights"}
    )
    assert [f.code for f in same] == [0, 0]


def test_each_rank_has_random_streams_of_its_own() -> None:
    drawn = set()
    for seed, rank in ((0, 0), (0, 1), (1, 0)):
        for _ in range(2):
            seed_process(seed, rank)
            drawn.add((float(torch.rand(())), random.random(), float(numpy.random.rand())))
    assert len(drawn) == 3, "neither repeated nor shared"
    assert all(len(set(column)) == 3 for column in zip(*drawn))


class OtherDataOnRank3(Callback):
    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.progress.step == 4 and trainer.meshes.rank == 3:
            loader = trainer.loader
            loader._at = loader._at._replace(cursor=loader.cursor + loader.global_batch)


@pytest.mark.slow
def test_a_rank_that_reads_another_batch_is_named(tmp_path: Path) -> None:
    fitted = runs.fit_on_ranks(4, runs.make_job(tmp_path), OtherDataOnRank3)
    assert [(f.code, f.step) for f in fitted] == [(65, 4)] * 4
    assert "step 5: ranks [3] " in fitted[0].problems[0]


@pytest.mark.lane("quick")
def test_a_configuration_error_of_one_rank_ends_all(tmp_path: Path) -> None:
    job = runs.make_job(tmp_path)
    refused = run_on_ranks(2, fit_with_blocked_folder, job)
    assert [f.code for f in refused] == [78, 78]
    assert "rank 1: run.dir" in refused[0].problems[0]


def fit_with_blocked_folder(job: Path) -> runs.Fitted:
    blocked = job.parent / "a file"
    blocked.touch()
    folder = job.parent / "run" if dist.get_rank() == 0 else blocked / "run"
    return runs.fit(job, {"run.dir": str(folder), "metrics.console": "off"})


# ---- numbers that are not finite


class NanOnRank1(Callback):
    """Poisons one rank's gradient in steps 5 and 6; its loss stays finite."""

    def on_start(self, trainer: Trainer) -> None:
        def poison(gradient: torch.Tensor) -> torch.Tensor:
            bad = trainer.meshes.rank == 1 and trainer.progress.step in (4, 5)
            return gradient * float("nan") if bad else gradient

        def watch(module: Any, args: Any, logits: torch.Tensor) -> None:
            if logits.requires_grad:
                logits.register_hook(poison)

        trainer.model.register_forward_hook(watch)


def fit_with_nans(folder: Path, allowed: int) -> list[runs.Fitted]:
    nonfinite = {"action": "skip", "max_in_a_row": allowed}
    keys = {f"resilience__nonfinite__{key}": value for key, value in nonfinite.items()}
    return runs.fit_on_ranks(2, runs.make_job(folder), NanOnRank1, **keys)


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_F34_a_bad_gradient_on_one_rank_masks_the_update_of_all(tmp_path: Path) -> None:
    fitted = fit_with_nans(tmp_path, allowed=2)
    assert [f.code for f in fitted] == [0, 0]
    assert all(torch.isfinite(w).all() for f in fitted for w in f.weights.values())
    rows = read_run(tmp_path / "run").metrics
    assert [step for step, n in zip(rows["step"], rows["grad_norm"]) if n is None] == [5, 6]
    assert sum(rows["skipped_steps"]) == 2
    assert rows["lr"][6] != rows["lr"][4]  # the schedule went on


def test_more_bad_steps_than_allowed_end_all_ranks_and_no_weight_changes(tmp_path: Path) -> None:
    fitted = fit_with_nans(tmp_path, allowed=1)
    assert [f.code for f in fitted] == [76, 76]
    (problem,) = fitted[0].problems
    assert re.findall(r"\d+", problem) == ["5", "6", "1", "3"]  # bad steps, allowed, saved
    assert "resilience.nonfinite.max_in_a_row" in problem
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert all(json.loads(line, parse_constant=pytest.fail) for line in lines)
    assert load_trained(tmp_path / "run")[2] == 3


# ---- other numbers of ranks


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 1, 3])
def test_saved_on_four_ranks_goes_on_on_another_number(
    tmp_path: Path, alone: Any, world: int
) -> None:
    job = runs.make_job(tmp_path)
    runs.fit_on_ranks(4, job, TermOnRank2)
    fitted = [runs.fit_alone(job)] if world == 1 else runs.fit_on_ranks(world, job)
    assert [(f.code, f.step) for f in fitted] == [(0, 12)] * world
    runs.assert_same_rows(runs.columns(job), alone[0])
    runs.assert_close(fitted[0].weights, alone[1].weights)


@pytest.mark.slow
def test_F101_goes_on_on_numbers_of_ranks_that_do_not_divide_the_batch(tmp_path: Path) -> None:
    """16 rows on 4 ranks, on 3, on 4 again, on 7: what one process trains, evaluates and reports."""
    sizes = {"train.global_batch": 16, "train.micro_batch": 2, "eval.sequences": 10}
    wanted = runs.make_job(tmp_path / "alone")
    alone = runs.fit_reference(wanted, **sizes)
    job = runs.make_job(tmp_path / "ranks")
    options = {key.replace(".", "__"): value for key, value in sizes.items()}
    keep = {"checkpoint__every_steps": 3, "checkpoint__keep_last": 9}
    for world, step in ((4, 3), (3, 6), (4, 9), (7, 12)):
        fitted = runs.fit_on_ranks(world, job, **options, **keep)
        assert [(f.code, f.problems) for f in fitted] == [(0, ())] * world
        for folder in (tmp_path / "ranks/run/checkpoints").glob("step-*"):
            if int(folder.name.removeprefix("step-")) > step:
                shutil.rmtree(folder)
    runs.assert_same_rows(runs.columns(job), runs.columns(wanted))
    runs.assert_close(fitted[0].weights, alone.weights)
    tokens = read_run(job.parent / "run").metrics["tokens"]
    assert tokens == read_run(wanted.parent / "run").metrics["tokens"]


@pytest.mark.slow
def test_F101_explain_and_run_report_the_cost_of_uneven_shares(tmp_path: Path) -> None:
    job = runs.make_job(tmp_path)
    cost = re.compile(r"\b5 readers .*\b12 .*\b3, 1 .*\b25\.0%")
    told = forge_train("explain", job, "--nproc", "5")
    assert told.code == 0
    assert cost.search(told.out)
    assert not re.search(r"\b4 .*\b12 .*%", forge_train("explain", job, "--nproc", "4").out)
    fitted = runs.fit_on_ranks(5, job, None, train__steps=1)
    assert [f.code for f in fitted] == [0] * 5
    lines = (tmp_path / "run/events.jsonl").read_text().splitlines()
    (begun,) = [row for row in map(json.loads, lines) if row["event"] == "start"]
    assert any(cost.search(reason) for reason in begun["reasons"])


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_explain_prints_the_cost_of_the_layout_that_the_planner_chooses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def choose(job: Any, world_size: int, gpus_per_node: int) -> Any:
        return replace(job.config.parallel, layout="manual", tp=2), [f"tp 2 of {world_size} ranks"]

    monkeypatch.setattr("forge_train.plan.choose_layout", choose)
    monkeypatch.setenv("COLUMNS", "200")  # an origin may be folded in a narrow terminal
    flags = ["--nproc", "10", "--parallel.layout", "auto", "--train.micro_batch", "3"]
    assert cli.explain([str(runs.make_job(tmp_path)), *flags]) == 0
    told = capsys.readouterr().out
    assert "chosen by the planner" in told  # prose: config.toml is read back by this mark
    assert "tp 2 of 10 ranks" in told
    assert re.search(r"\b5 readers .*\b12 ", told)
    assert cli.explain([str(runs.make_job(tmp_path)), "--nproc", "4"]) == 0
    assert not capsys.readouterr().out.endswith("\n\n")


@pytest.mark.slow
def test_a_layout_of_another_number_of_ranks_is_rejected(tmp_path: Path) -> None:
    for verb in ("run", "explain"):
        refused = forge_train(
            verb, runs.make_job(tmp_path), "--nproc", "5", "--parallel.dp_shard", "2"
        )
        assert refused.code == 78
        assert re.search(r"dp_shard 2 .*\b5 ranks", refused.err)


def test_a_rank_without_its_group_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in world.items():
        monkeypatch.setenv(name, value)
    end_process_group()  # of an earlier test
    trainer = Trainer(load_job(runs.make_job(tmp_path)))
    with rejects("WORLD_SIZE", "2", "group", ConfigError):
        trainer.fit()


def test_a_group_unknown_to_the_environment_is_an_error(tmp_path: Path) -> None:
    trainer = Trainer(load_job(runs.make_job(tmp_path)))
    meshes = Meshes(torch.device("cpu"), world_size=2, batch_size=2)
    with rejects("meshes", 2, "mismatch", ConfigError):
        trainer.fit(meshes)


class _LosesRankOne(Callback):
    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.progress.step == 2 and trainer.meshes.rank == 1:
            os._exit(9)


def _dispatch(job: Path, said: Path) -> None:
    """`forge-train run` of a rank as far as errors go, in the ranks of the pool."""
    stderr, sys.stderr = sys.stderr, io.StringIO()
    cli.VERBS["run"] = lambda args: runs.fit(job, {"metrics.console": "off"}, _LosesRankOne).code
    try:
        code = cli._dispatch(["run"])
        (said / str(dist.get_rank())).write_text(f"{code} {sys.stderr.getvalue()}")
    finally:
        sys.stderr = stderr


def test_F105_a_rank_that_loses_another_prints_one_line(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"rank 1: .*\b9\b"):
        run_on_ranks(2, _dispatch, runs.make_job(tmp_path), tmp_path, timeout=60)
    (line,) = (tmp_path / "0").read_text().splitlines()
    assert re.match(r"1 forge-train: rank 0: .*\(Connection ", line)


# ---- the command itself


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks through the command, never disturbed."""
    job = runs.make_job(tmp_path_factory.mktemp("undisturbed"))
    done = forge_train("run", job, "--nproc", "2", "--train.steps", "30")
    assert done.code == 0, done.err
    assert f"run {job.parent / 'run/config.toml'} --nproc 2 --train.steps 60" in done.out
    return job


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_sigkill_of_a_rank_at_random_instants_then_the_same_command_gives_the_same_bits(
    tmp_path: Path, undisturbed: Path, seed: int
) -> None:
    """The first half of the seeds strike at a step, the others anywhere between start-up and end."""
    job, draw = runs.make_job(tmp_path), random.Random(seed)
    command = (
        "run",
        job,
        "--nproc",
        "2",
        "--train.steps",
        "30",
        "--data.num_workers",
        str(seed % 2),
    )
    first = start(*command)
    if seed < 2:
        wait_for_step(first, tmp_path / "run/metrics.jsonl", draw.randint(1, 25))
        signal_rank(first.pid, draw.randrange(2), signal.SIGKILL)
    else:
        pid = signal_rank(first.pid, draw.randrange(2), 0)
        signal_at_random(pid, seed, within_seconds=6.0)
    struck = time.monotonic()
    out, err = first.communicate(timeout=60)
    assert first.returncode == 1 or seed >= 2, (out, err)
    assert "Traceback" not in err
    assert time.monotonic() - struck < 30, "the other rank waited"
    assert rank_pids(first.pid) == {}
    done = forge_train(*command)
    assert done.code == 0, done.err
    assert runs.columns(job) == runs.columns(undisturbed)
    mine, theirs = load_trained(tmp_path / "run")[0], load_trained(undisturbed.parent / "run")[0]
    for (name, a), (_, b) in zip(mine.state_dict().items(), theirs.state_dict().items()):
        assert torch.equal(a, b), name


@pytest.mark.slow
def test_a_signal_to_the_launcher_or_one_rank_of_four_is_exit_75_and_the_command_goes_on(
    tmp_path: Path,
) -> None:
    job = runs.make_job(tmp_path)
    command = ("run", job, "--nproc", "4", "--train.steps", "4000", "--checkpoint.every_steps", "0")
    saved = []
    for rank in (2, None):
        process = start(*command)
        wait_for_step(process, tmp_path / "run/metrics.jsonl", 2 + (saved[-1] if saved else 0))
        if rank is None:
            process.send_signal(signal.SIGTERM)
        else:
            signal_rank(process.pid, rank, signal.SIGTERM)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 75, (out, err)
        assert "Traceback" not in err
        events = read_run(tmp_path / "run").events
        assert [e["event"] for e in events[-2:]] == ["save", "stop"]
        saved.append(events[-1]["step"])
    (resumed,) = (e["step"] for e in events if e["event"] == "resume")
    assert resumed == saved[0] < saved[1]


@pytest.mark.slow
def test_a_flipped_bit_in_one_ranks_file_falls_back_on_all_ranks_with_an_event(
    tmp_path: Path, alone: Any
) -> None:
    job = runs.make_job(tmp_path)
    runs.fit_on_ranks(4, job)
    newest = max((tmp_path / "run/checkpoints").glob("step-*"))
    flip_bit(newest / "data-2.bin", seed=3)
    fitted = runs.fit_on_ranks(4, job)
    assert [f.code for f in fitted] == [0] * 4
    runs.assert_close(fitted[3].weights, alone[1].weights)
    events = read_run(tmp_path / "run").events
    (aside,) = (e for e in events if e["event"] == "quarantine")
    assert (aside["step"], "data-2.bin" in aside["reason"]) == (12, True)
    assert [e["step"] for e in events if e["event"] == "resume"] == [9]
