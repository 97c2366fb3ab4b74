"""Sinks by name: opened with the run directory and the step resumed from, checked before anything starts, and
never waited for twice."""

from __future__ import annotations

import json
import resource
import threading
from pathlib import Path
from typing import Any

import pytest

from forge_resilience import recorder
from forge_resilience.sinks import scalars
from forge_testing import write_job
from forge_testing.problems import rejects
from forge_testing.runs import fit_on_ranks, make_job
from forge_train import Callback, ConfigError, Trainer, load_job, read_run
from forge_train.cli import run_verb
from forge_train.metrics.columns import COLUMNS, tracker_name

LINES = "forge_testing.extensions:LineSink"


def keys(name: str = LINES, table: str = "mine", **options: Any) -> dict[str, Any]:
    found = {f"metrics.sinks.{table}.name": name}
    return found | {f"metrics.sinks.{table}.options.{k}": v for k, v in options.items()}


def run(job: Path, **overrides: Any) -> Path:
    Trainer(load_job(job, {"schedule.name": "constant", "train.steps": 6, **overrides})).fit()
    return job.parent / "run"


def test_a_sink_by_name_gets_the_rows_and_the_step_it_goes_on_from(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    folder = run(job, **keys(file="rows.txt"))
    run(job, **keys(file="rows.txt"), **{"train.steps": 8})
    opened, *rows = [json.loads(line) for line in (folder / "rows.txt").read_text().splitlines()]
    assert opened == {"resume_step": 0}
    assert rows.pop(6) == {"resume_step": 6}
    assert rows == [
        json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.distributed
def test_only_rank_0_opens_sinks(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    for rank in fit_on_ranks(2, job, **keys(file="rows.txt"), train__steps=2):
        assert rank.problems == ()
    assert (tmp_path / "run/rows.txt").read_text().count("resume_step") == 1


def test_each_column_has_a_section_and_a_name_of_its_own_in_trackers() -> None:
    without = {column.name for column in COLUMNS if not column.section}
    assert without == {c.name for c in COLUMNS if not scalars({c.name: 1.0})}  # of no plot
    listed = [column.name for column in COLUMNS if column.section]
    mine = ["fisher", "train/loss", "moe/0.dead", "extension/fisher", "eval/val_loss", "loss.mine"]
    names = {name: tracker_name(name) for name in [*listed, *mine]}
    assert len(set(names.values())) == len(names)
    assert all(name.count("/") for name in names.values())
    assert {n: names[n] for n in ("loss", "val_loss", "mfu", "eval/<name>/loss", "moe.<layer>.dead", "fisher")} == {
        "loss": "train/loss", "val_loss": "eval/val_loss", "mfu": "perf/mfu", "eval/<name>/loss": "eval/<name>/loss",
        "moe.<layer>.dead": "moe/<layer>.dead", "fisher": "extension/fisher"}  # fmt: skip


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_tensorboard_has_the_rows_by_section_and_flat_names_on_request(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    job = write_job(tmp_path, "\n[model.moe]\nnum_experts = 2\n")
    for flat in (False, True):
        folder = tmp_path / f"flat-{flat}"
        asked = {"metrics.tensorboard": True, "metrics.flat_names": flat, "run.dir": str(folder)}
        run(job, **asked, **{"metrics.every_steps": 2})
        found = EventAccumulator(str(folder / "tensorboard")).Reload()
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

        named = {k: k if flat else tracker_name(k) for row in rows for k in scalars(row)}
        assert {"loss", "moe.0.dead"} <= named.keys()
        assert set(found.Tags()["scalars"]) == set(named.values())
        for column, name in named.items():
            got = [(point.step, point.value) for point in found.Scalars(name)]
            wanted = [(row["step"], row[column]) for row in rows if column in scalars(row)]
            assert got == [(step, pytest.approx(value)) for step, value in wanted], column


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_tensorboard_is_a_built_in_name_and_the_older_key_its_shorthand(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    job = write_job(tmp_path)
    names = keys("tensorboard", "curves")
    for number, asked in enumerate(
        ({"metrics.tensorboard": True}, names, {**names, "metrics.tensorboard": True})
    ):
        folder = (
            run(job, **asked, **{"run.dir": str(tmp_path / f"run{number}")}).parent / f"run{number}"
        )
        assert len(list((folder / "tensorboard").iterdir())) == 1, asked


@pytest.mark.parametrize(
    ("table", "key", "value", "code"),
    [
        ('name = "tensorbord"', "name", "tensorbord", "unknown"),
        ('name = "no_lab:Sink"', "name", "no_lab:Sink", "import"),
        (
            f'name = "{LINES}"\noptions = {{file = "a", fil = "b"}}',
            "options.fil",
            "b",
            "unknown_key",
        ),
        (f'name = "{LINES}"\noptions = {{file = 3}}', "options.file", 3, "type"),
        ('name = "tensorboard"\noptions = {every = 2}', "options.every", 2, "unknown_key"),
        ('name = "wandb"\noptions = {tags = "a"}', "options.tags", "a", "type"),
        ('name = "wandb"\noptions = {mode = "of"}', "options.mode", "of", "type"),
        ('name = "mlflow"\n[metrics.sinks.other]\nname = "mlflow"', "", "mlflow", "duplicate"),
        ("options = {every = 2}", "name", ..., "missing"),
    ],
)
@pytest.mark.parametrize("verb", ["explain", "run"])
def test_a_wrong_name_or_option_is_rejected_before_a_run_exists(
    tmp_path: Path, verb: str, table: str, key: str, value: Any, code: str
) -> None:
    job = write_job(tmp_path, f"\n[metrics.sinks.mine]\n{table}\n")
    own = f"metrics.sinks.mine.{key}" if key else "metrics.sinks"
    with rejects(own, value, code, ConfigError):
        run_verb([verb, str(job)])
    assert not (tmp_path / "run").exists()


class Hanging:
    """Never comes back from its first row."""

    go = threading.Event()

    def __init__(self, directory: Path, resume_step: int) -> None:
        pass

    def write(self, row: Any) -> None:
        self.go.wait()

    def close(self) -> None:
        pass


class Failing(Hanging):
    def write(self, row: Any) -> None:
        raise OSError(28, "No space left on device")


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_a_hanging_sink_is_waited_for_at_no_save_and_once_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    flushes: list[bool] = []

    class Counted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            answered = super().wait(timeout)
            if timeout == 5.0:  # of a flush
                flushes.append(answered)
            return answered

    class Arm(Callback):
        def on_start(self, trainer: Trainer) -> None:
            monkeypatch.setattr(recorder.threading, "Event", Counted)

    monkeypatch.setattr(recorder, "END_SECONDS", 0.5)
    job = write_job(tmp_path)
    every = {**keys(f"{__name__}:Hanging"), **keys(f"{__name__}:Failing", "full")}
    overrides = {"train.steps": 6, "checkpoint.every_steps": 1, "schedule.name": "constant"}
    try:
        Trainer(load_job(job, {**every, **overrides}), [Arm()]).fit()
    finally:
        Hanging.go.set()
    run = read_run(tmp_path / "run")
    assert [e["step"] for e in run.events if e["event"] == "save"] == [1, 2, 3, 4, 5, 6]
    assert run.metrics["step"] == [1, 2, 3, 4, 5, 6]
    assert flushes == [True] * 6  # of metrics.jsonl alone
    err = capfd.readouterr().err
    assert "metrics.sinks.full: OSError: [Errno 28] No space left on device" in err
    assert err.count("metrics.sinks.mine: ") == 1


def test_a_disk_without_space_for_rows_and_events_does_not_stop_a_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)

    class Full(Callback):
        def on_step_end(self, trainer: Trainer) -> None:
            step = trainer.progress.step
            trainer.run.recorder.flush()
            full = step in (2, 3)  # in the second row, and less than the messages of this test
            resource.setrlimit(resource.RLIMIT_FSIZE, (700, limit[1]) if full else limit)
            trainer.run.recorder.record("mine", step=step, text="x" * 700)

    job = write_job(tmp_path)
    off = {"checkpoint.every_steps": 0, "eval.every_steps": 0, "metrics.console": "off"}
    overrides = {"train.steps": 6, "schedule.name": "constant", **off}
    try:
        Trainer(load_job(job, overrides), [Full()]).fit()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    run = read_run(tmp_path / "run")
    assert run.metrics["step"] == [1, 2, 3, 4, 5, 6]
    assert [e["step"] for e in run.events if e["event"] == "mine"] == [1, 4, 5, 6]
    err = capfd.readouterr().err
    assert err.count(f"{tmp_path}/run/metrics.jsonl: File too large") == 1
    assert err.count("events.jsonl") == 1
