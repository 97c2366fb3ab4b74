"""The ledger of real runs: killed, stopped, started again, waiting for data."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path

import pytest

from forge_lab.cli import goodput
from forge_lab.report.goodput import print_goodput
from forge_testing import forge_train, kill_after_step, start, write_job
from forge_testing.problems import rejects
from forge_train import ConfigError, Trainer, load_job, read_run

pytestmark = pytest.mark.lane("test")


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed once and stopped once."""
    folder = tmp_path_factory.mktemp("disturbed")
    job, metrics = write_job(folder), folder / "run/metrics.jsonl"
    flags = ("--train.steps", "300", "--checkpoint.every_steps", "40", "--eval.every_steps", "100")
    kill_after_step(start("run", job, *flags), metrics, 60, saved=40)
    stopped = kill_after_step(start("run", job, *flags), metrics, 100, signal.SIGTERM)
    assert stopped.code == 75, stopped.err
    done = forge_train("run", job, *flags)
    assert done.code == 0, done.err
    return folder / "run"


@pytest.mark.slow
def test_report_lists_where_the_seconds_went(disturbed: Path) -> None:
    told = forge_train("goodput", disturbed, "--json")
    assert told.code == 0, told.err
    found = json.loads(told.out)
    assert (found["lives"], found["losses"], found["stops"], found["steps"]) == (3, 1, 1, 300)
    assert sum(found["seconds"].values()) == pytest.approx(found["wall_seconds"], abs=1e-6)
    for cause in ("steps", "recompute", "start", "load", "save", "evaluate", "down", "queue"):
        assert found["seconds"][cause] > 0, cause
    events = read_run(disturbed).events
    first, last = events[0], events[-1]
    assert last["event"] == "done"
    assert found["best_interval"] > 0
    assert 0 < found["ettr"] < 1
    resumed = [e for e in events if e["event"] == "resume"]
    assert resumed[0]["step"] + resumed[0]["steps_lost"] == resumed[0]["reached"]["step"] >= 60
    # on a busy machine a save may be committed just before the kill
    assert (resumed[0]["seconds_lost"] > 0) == (resumed[0]["steps_lost"] > 0)
    assert resumed[1]["steps_lost"] == resumed[1]["seconds_lost"] == 0  # of a stop nothing is lost
    assert first["began"] < resumed[0]["began"] < resumed[1]["began"]
    table = forge_train("goodput", disturbed)
    assert table.code == 0, table.err
    for cause in found["seconds"]:
        assert re.search(rf"^{cause} +\d+\.\d", table.out, re.MULTILINE)


def test_a_folder_without_a_run_is_rejected(tmp_path: Path) -> None:
    with rejects("run", str(tmp_path), "not_found", ConfigError):
        goodput([str(tmp_path)])


def test_the_report_has_the_seconds_that_steps_waited_for_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Trainer(load_job(write_job(tmp_path), {"metrics.console": "off"})).fit()
    folder = tmp_path / "run"
    waited = sum(read_run(folder).metrics["data_wait_seconds"])
    capsys.readouterr()
    print_goodput(folder, as_json=False)
    assert f" {waited:.3f} s " in capsys.readouterr().out
    print_goodput(folder, as_json=True)
    assert json.loads(capsys.readouterr().out)["data_wait_seconds"] == waited


@pytest.mark.parametrize("make", ["mkfifo", "ln -s /dev/zero"])
def test_F187_metrics_that_are_no_file_are_named(tmp_path: Path, make: str) -> None:
    (tmp_path / "events.jsonl").touch()
    subprocess.run([*make.split(), tmp_path / "metrics.jsonl"], check=True)
    done = forge_train("goodput", tmp_path)
    assert done.code == 1
    assert done.err.startswith(f"forge-train: {tmp_path}/metrics.jsonl: ")
    assert done.err.count("\n") == 1
