"""Runs on a set that is read while training: the same data on any number of ranks, and after a kill on others."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from forge_ckpt import SavedTensors
from forge_testing import forge_train, kill_after_step, runs, start, wait_for_step
from forge_testing.extensions import smoothed
from forge_testing.faults import signal_rank
from forge_testing.problems import rejects
from forge_train import Callback, DataError, Trainer, load_job

pytestmark = pytest.mark.lane("test")

STREAMED = """
[data.sources.text]
name = "huggingface"
path = "{path}"
[data.sources.text.huggingface]
streaming = true
virtual_shards = 6
shuffle_window = 4
[data.validation]
name = "builtin"
split = "validation"
"""
QUIET = {"metrics.console": "off", "sample.max_new_tokens": 0}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of parquet with six row groups together."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("datasets")
    folder = tmp_path_factory.mktemp("set")
    for file in range(2):
        rows = [f"chapter {file} {i}: " + "once upon a time " * (1 + i % 7) for i in range(24)]
        pq.write_table(pa.table({"text": rows}), folder / f"{file}.parquet", 8)
    return folder


def streamed_job(folder: Path, texts: Path) -> Path:
    job = runs.make_job(folder)
    text = job.read_text()
    begin, end = text.index("[data.sources.text]"), text.index("[train]")
    job.write_text(text[:begin] + STREAMED.format(path=texts) + text[end:])
    return job


class Stop(Callback):
    """A scheduler's signal in the fifth step: the run saves and ends."""

    def on_step_end(self, trainer: Any, *_: Any) -> None:
        if trainer.progress.step == 5:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, texts: Path) -> dict[str, list]:
    job = streamed_job(tmp_path_factory.mktemp("whole"), texts)
    runs.fit_alone(job, **QUIET)
    return runs.columns(job)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("before", "after", "workers"), [(2, 3, 0), (3, 1, 0), (1, 2, 2)])
def test_stopped_it_goes_on_with_the_same_rows_on_other_ranks(
    tmp_path: Path, texts: Path, whole: dict[str, list], before: int, after: int, workers: int
) -> None:
    job = streamed_job(tmp_path, texts)
    quiet = {key.replace(".", "__"): value for key, value in QUIET.items()}
    stopped = runs.fit_on_ranks(before, job, Stop, **quiet)
    assert {rank.step for rank in stopped} == {6}  # the step of the signal is under way
    with SavedTensors(tmp_path / "run/checkpoints") as saved:
        state = saved.read_object("loader")
    alone = Trainer(load_job(streamed_job(tmp_path / "alone", texts), QUIET)).loader
    for _ in range(6):
        next(alone)
    assert state == alone.state_dict()  # of all ranks, each of which read its shards alone
    done = runs.fit_on_ranks(after, job, data__num_workers=workers, **quiet)
    assert all(rank.problems == () for rank in done)
    runs.assert_same_rows(runs.columns(job), whole)


@pytest.mark.slow
def test_killed_it_goes_on_with_the_same_rows(tmp_path: Path, texts: Path, whole: dict) -> None:
    job = streamed_job(tmp_path, texts)
    flags = ["--checkpoint.wait", "true", "--sample.max_new_tokens", "0"]
    kill_after_step(start("run", job, *flags), tmp_path / "run/metrics.jsonl", 5)
    done = forge_train("run", job, *flags)
    assert done.code == 0, done.err
    runs.assert_same_rows(runs.columns(job), whole)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("workers", "nproc"), [(1, 3), (0, 1)])
def test_a_rank_of_two_is_killed_and_others_go_on_with_the_same_rows(
    tmp_path: Path, texts: Path, whole: dict[str, list], workers: int, nproc: int
) -> None:
    """In the middle of a save or a step, with a worker each that dies with its rank."""
    job = streamed_job(tmp_path, texts)
    flags = ["--data.num_workers", str(workers), "--sample.max_new_tokens", "0"]
    first = start("run", job, "--nproc", "2", *flags)
    wait_for_step(first, tmp_path / "run/metrics.jsonl", 5)
    signal_rank(first.pid, workers, signal.SIGKILL)
    _, err = first.communicate(timeout=60)
    assert first.returncode == 1, err
    done = forge_train("run", job, "--nproc", str(nproc), *flags)
    assert done.code == 0, done.err
    runs.assert_same_rows(runs.columns(job), whole)


def poisoned(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    """The loss of rows, which is beyond all measure in the seventh step."""
    ids = batch.instance_ids
    bad = ((ids >= 75) & (ids < 80)).any()
    return {"loss": smoothed(model, batch)["loss"] * torch.where(bad, math.inf, 1.0)}


class LeaveOut(Callback):
    def on_start(self, trainer: Trainer) -> None:
        trainer.loader.skip(72, 83)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("phased", [False, True])
def test_a_rollback_leaves_its_rows_out_and_reads_the_shards_again(
    tmp_path: Path, texts: Path, phased: bool
) -> None:
    jobs = [streamed_job(tmp_path / name, texts) for name in "ab"]
    how = {key.replace(".", "__"): value for key, value in QUIET.items()} | {
        "train__objective": f"{__name__}:poisoned",
        "resilience__nonfinite__action": "rollback",
        "resilience__nonfinite__max_in_a_row": 0,
    }
    if phased:
        how |= {"data__phases__late__start_instance": 96, "data__phases__late__global_batch": 24}
    found = [runs.fit_on_ranks(2, job, *more, **how) for job, more in zip(jobs, ((), (LeaveOut,)))]
    assert all(rank.problems == () for ranks in found for rank in ranks)
    mine, theirs = map(runs.together, found)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    runs.assert_same_rows(runs.columns(jobs[0]), runs.columns(jobs[1]))
    with SavedTensors(tmp_path / "a/run/checkpoints") as saved:
        state = saved.read_object("loader")
    with SavedTensors(tmp_path / "b/run/checkpoints") as saved:
        assert state == saved.read_object("loader")
    assert state["skipped"] == [[72, 83]]


def test_changed_files_are_rejected_at_the_resume(tmp_path: Path, texts: Path) -> None:
    job = streamed_job(tmp_path, texts)
    runs.fit_alone(job, **{**QUIET, "train.steps": 3})
    with rejects("fingerprint", ["stream.shuffle_window"], "mismatch", DataError):
        runs.fit_alone(job, **{**QUIET, "data.sources.text.huggingface.shuffle_window": 5})


def test_its_validation_is_of_the_same_set_and_not_streamed(tmp_path: Path, texts: Path) -> None:
    job = streamed_job(tmp_path, texts)
    text = job.read_text()
    begin, end = text.index("[data.validation]"), text.index("[train]")
    job.write_text(text[:begin] + text[end:])
    table = load_job(job, QUIET).config.data.validation
    assert table is not None
    assert (table.path, table.split, table.huggingface.streaming) == (
        str(texts),
        "validation",
        False,
    )


def test_a_set_that_is_not_there_is_one_line(tmp_path: Path, texts: Path) -> None:
    job = streamed_job(tmp_path, tmp_path / "nowhere")
    with rejects("data.sources.text.path", code="not_found", kind=Exception) as error:
        Trainer(load_job(job, QUIET))
    assert type(error.value).__name__ == "DataError"
