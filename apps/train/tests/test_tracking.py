"""Runs in W&B and MLflow: one run for all lives of a run directory, with its rows and its configuration.

Both are the real packages: wandb writes its own files, which its messages read back, MLflow a file store.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forge_testing import forge_train, write_job
from forge_train import read_run
from forge_train.metrics.columns import tracker_name

TABLES = """
[metrics.sinks.curves]
name = "wandb"
options = {project = "tiny", mode = "offline", tags = ["a", "b"]}

[metrics.sinks.store]
name = "mlflow"
options = {experiment = "tiny", tags = {kind = "test"}}
"""


def live(job: Path, steps: int) -> dict[str, list[Any]]:
    """One life of the run, as a process of its own; its metrics. The environment of CI switches wandb off."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "MLFLOW"))}
    flags = ["--train.steps", str(steps), "--schedule.name", "constant"]
    # a busy machine takes longer than 10 s to import both
    code = (
        "import sys; from forge_resilience import recorder; recorder.END_SECONDS = 120.0\n"
        "from forge_train.cli import main\nmain(sys.argv[1:])"
    )
    command = [sys.executable, "-c", code, "run", job, *flags]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "sinks" not in done.stderr
    return read_run(job.parent / "run").metrics


def records(file: Path) -> Iterator[Any]:
    """The messages of a .wandb file: a log in blocks of 32 KiB, after a head of 7 bytes, of pieces of messages."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if -at % 32768 < 7:  # too little is left of this block for another head
            at += -at % 32768
        _, size, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole message, or the last piece of one
            found = Record()
            found.ParseFromString(parts)
            parts = b""
            yield found


def history(file: Path) -> tuple[str, dict[str, Any], dict[int, dict[str, float]]]:
    """Of a .wandb file: the id of its run, its configuration, and its rows by step."""
    number, config, rows = "", dict[str, Any](), dict[int, dict[str, float]]()
    for record in records(file):
        if record.HasField("run"):
            number = record.run.run_id
            assert (record.run.project, [*record.run.tags]) == ("tiny", ["a", "b"])
        items = [*record.config.update, *record.run.config.update]
        config |= {item.key or item.nested_key[0]: json.loads(item.value_json) for item in items}
        if record.HasField("history"):
            row = {
                i.key or ".".join(i.nested_key): json.loads(i.value_json)
                for i in record.history.item
            }
            rows[record.history.step.num] = row
    return number, config, rows


@pytest.mark.slow  # wandb and mlflow are imported in two processes
def test_two_attempts_are_one_run_in_wandb_and_in_mlflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow.tracking import MlflowClient

    job, folder = write_job(tmp_path, TABLES), tmp_path / "run"
    first = live(job, 5)
    newest = max((folder / "checkpoints").glob("step-*"))
    shutil.rmtree(newest)  # as after a kill: the second life makes step 5 again
    second = live(job, 7)
    assert first["step"] + [6, 7] == second["step"]

    files = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))
    lives = [history(file) for file in files]
    resumed = min(lives[1][2])
    assert len(lives) == 2
    assert {number for number, _, _ in lives} == {(folder / "wandb.id").read_text().strip()}
    assert [config["train"]["steps"] for _, config, _ in lives] == [5, 7]
    assert set(lives[0][2]) == set(first["step"])
    assert set(lives[1][2]) == set(range(resumed, 8))
    assert resumed <= 5
    # W&B gets sections, and names of its own begin with `_`
    columns = {name for name in lives[1][2][7] if not name.startswith("_")}
    assert columns <= {tracker_name(name) for name in second} - {"step", "schema"}
    assert {name.split("/")[0] for name in columns} == {"train", "eval", "perf"}
    for name in ("loss", "lr", "tokens", "device_hours"):
        expected = dict(zip(second["step"], second[name]))
        sent = {step: row[tracker_name(name)] for step, row in lives[1][2].items()}
        assert sent == {step: expected[step] for step in sent}, name

    client = MlflowClient(tracking_uri=(folder / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("tiny")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.run_id == (folder / "mlflow.id").read_text().strip()
    assert (found.info.status, found.data.tags["kind"]) == ("FINISHED", "test")
    assert found.data.params["train.steps"] == "5"  # MLflow's params cannot change
    points = client.get_metric_history(found.info.run_id, "train/loss")
    assert [p.step for p in points] == second["step"]  # none twice
    assert [p.value for p in points] == second["loss"]

    psutil = pytest.importorskip("psutil")
    pids = {e["pid"] for e in read_run(folder).events}
    left = [p for p in psutil.process_iter(["cmdline"]) if {"--pid"} & {*(p.info["cmdline"] or ())}]
    ours = [p for p in left if {str(pid) for pid in pids} & {*p.info["cmdline"]}]
    _, alive = psutil.wait_procs(ours, timeout=30)
    assert not alive


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_named_before_anything_starts(tmp_path: Path, name: str) -> None:
    job = write_job(tmp_path, f'\n[metrics.sinks.mine]\nname = "{name}"\n')
    code = (
        f"import sys; sys.modules[{name!r}] = None\n"
        "from forge_train.cli import main\nmain(sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "run", job], capture_output=True, text=True, check=False
    )
    assert done.returncode == 78
    assert done.stderr.startswith("forge-train: metrics ")
    assert f"'forge-train[{name}]'" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_without_a_key_wandb_does_not_prompt_and_training_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    job = write_job(tmp_path, '\n[metrics.sinks.mine]\nname = "wandb"\n')
    done = forge_train(
        "run", job, "--train.steps", "2", WANDB_MODE="online", HOME=str(tmp_path), WANDB_API_KEY=""
    )
    assert done.code == 0
    assert "metrics.sinks.mine: " in done.err
    assert "WANDB_API_KEY" in done.err
    assert read_run(tmp_path / "run").metrics["step"] == [1, 2]
