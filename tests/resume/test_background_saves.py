"""Runs that do not wait for their checkpoints: when callbacks hear of them, stops, full disks."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from forge_resilience.journal import read_events
from forge_testing import run_on_ranks
from forge_testing.disk import Disk
from forge_testing.runs import fit as fit_rank
from forge_testing.runs import make_job
from forge_train import Callback, JobError, Trainer, load_job, read_run
from forge_train.loop.trainer import RunResult

pytestmark = pytest.mark.lane("test")


@pytest.fixture
def disk() -> Iterator[Disk]:
    found = Disk()
    yield found
    found.restore()


class Heard(Callback):
    """(step done, step that was saved, whether it is there) of each call; all of it must be alike on all ranks."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, bool]] = []

    def on_checkpoint(self, trainer: Trainer, step: int, path: Path) -> None:
        self.calls.append((trainer.progress.step, step, (path / "manifest.json").is_file()))


class SlowDisk(Heard):
    """The disk of this rank takes nothing from step 2 until the end of step 5."""

    def __init__(self, disk: Disk) -> None:
        super().__init__()
        self.disk = disk

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.progress.step == 2:
            self.disk.close()
            trainer.request_save()
        if trainer.progress.step == 5:
            self.disk.open()


def fit(job: Path, heard: Heard, **overrides: Any) -> RunResult:
    flat = {key.replace("__", "."): value for key, value in overrides.items()}
    return Trainer(load_job(job, {"metrics.console": "off", **flat}), [heard]).fit()


def kinds(folder: Path) -> list[tuple[str, int]]:
    names = {"save_staged", "save_written", "save", "save_failed", "stop", "done"}
    return [(e["event"], e["step"]) for e in read_run(folder / "run").events if e["event"] in names]


def test_a_run_trains_on_while_its_disk_is_slow(tmp_path: Path, disk: Disk) -> None:
    heard = SlowDisk(disk)
    result = fit(make_job(tmp_path), heard, checkpoint__every_steps=0, train__steps=8)
    assert result.step == 8
    (first, second) = heard.calls
    # asked for at step 2, decided in step 3; committed after step 5, and told a step later or two
    assert (first[1], first[2]) == (3, True)
    assert 6 <= first[0] <= 8
    assert second == (8, 8, True)
    assert kinds(tmp_path) == [
        *(("save_staged", 3), ("save_written", 3), ("save", 3)),
        *(("save_written", 8), ("save", 8), ("done", 8)),
    ]


class Term(SlowDisk):
    def on_step_end(self, trainer: Trainer) -> None:
        super().on_step_end(trainer)
        if trainer.progress.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
            self.disk.open()


def test_a_stop_commits_the_staged_save_and_then_the_last_step(tmp_path: Path, disk: Disk) -> None:
    heard = Term(disk)
    result = fit(make_job(tmp_path), heard, checkpoint__every_steps=0, train__steps=8)
    assert result.step == 5
    assert [step for _, step, _ in heard.calls] == [3, 5]
    assert kinds(tmp_path)[-3:] == [("save_written", 5), ("save", 5), ("stop", 5)]


class FullDisk(Heard):
    """Refuses the first `writes` writes."""

    def __init__(self, disk: Disk, writes: int) -> None:
        super().__init__()
        disk.refuses = writes

    def on_step_end(self, trainer: Trainer) -> None:
        """The failure of step 4 is known at the end of step 5."""
        deadline = time.monotonic() + 60
        while trainer.progress.step == 5 and time.monotonic() < deadline:
            if any(e["event"] == "save_failed" for e in read_events(trainer.paths.events)):
                break


def test_a_save_that_fails_is_made_good_in_the_next_steps(tmp_path: Path, disk: Disk) -> None:
    heard = FullDisk(disk, 1)
    result = fit(make_job(tmp_path), heard, checkpoint__every_steps=4, train__steps=12)
    assert result.step == 12
    events = read_run(tmp_path / "run").events
    (failed,) = [e for e in events if e["event"] == "save_failed"]
    assert (failed["step"], failed["failures"]) == (4, 1)
    assert "No space left on device" in failed["error"]
    saved = [e["step"] for e in events if e["event"] == "save"]
    # the training thread may know it at the end of step 5 already, or a moment after the journal says it
    assert saved[0] in (5, 6, 7), "after it is known, not at the next interval"
    assert saved[1:] == [8, 12]
    assert [step for _, step, _ in heard.calls] == saved


def test_a_disk_that_stays_full_ends_the_run(tmp_path: Path, disk: Disk) -> None:
    heard = FullDisk(disk, 10**6)
    with pytest.raises(JobError, match="No space left on device"):
        fit(make_job(tmp_path), heard, checkpoint__every_steps=1, train__steps=12)
    events = read_run(tmp_path / "run").events
    assert [e["failures"] for e in events if e["event"] == "save_failed"] == [1, 2, 3]
    assert heard.calls == []


class LateToHear(Heard):
    """The writing thread of this rank learns of a commit at the end of step 8."""

    def on_start(self, trainer: Trainer) -> None:
        record, self.gate = trainer.run.recorder.record, threading.Event()

        def late(event: str, **fields: Any) -> None:
            assert event != "save" or self.gate.wait(60)
            record(event, **fields)

        trainer.run.recorder.record = late  # type: ignore[method-assign]

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.progress.step == 8:
            self.gate.set()


def calls_of_a_rank(job: Path) -> Any:
    disk = Disk()
    heard = (Heard(), SlowDisk(disk), LateToHear())[dist.get_rank()]
    overrides = {"checkpoint.every_steps": 0, "train.steps": 10, "metrics.console": "off"}
    step = fit_rank(job, overrides, lambda: heard).step  # type: ignore[arg-type]
    disk.restore()
    return step, heard.calls


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.distributed
def test_all_ranks_see_a_checkpoint_in_the_same_step(tmp_path: Path) -> None:
    (one, *others) = run_on_ranks(3, calls_of_a_rank, make_job(tmp_path))
    assert others == [one, one]
    step, calls = one
    assert step == 10
    assert [saved for _, saved, _ in calls] == [3, 10]
    assert all(there for _, _, there in calls)


def test_a_save_longer_than_a_batch_job_allows_is_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = make_job(tmp_path, "")
    settings = {"train.steps": 1, "resilience.save_limit_seconds": 0.001}
    Trainer(load_job(job, {**settings, "run.dir": str(tmp_path / "slow")})).fit()
    assert "resilience.save_limit_seconds 0.001:" in capfd.readouterr().err
    (save,) = [e for e in read_run(tmp_path / "slow").events if e["event"] == "save"]
    assert save["limit"] == 0.001
    settings["resilience.save_limit_seconds"] = 300
    Trainer(load_job(job, {**settings, "run.dir": str(tmp_path / "quick")})).fit()
    assert capfd.readouterr().err == ""
    assert all("limit" not in event for event in read_run(tmp_path / "quick").events)
