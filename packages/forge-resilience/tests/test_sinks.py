"""Rows of metrics.jsonl: a full disk costs a warning, and a torn or foreign line itself."""

from __future__ import annotations

import json
import re
import resource
from pathlib import Path

import pytest

from forge_resilience.recorder import BackgroundSink, end_all
from forge_resilience.sinks import JsonlSink, MlflowSink, read_rows
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")


def test_rows_wait_for_a_disk_that_is_full_with_one_warning(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path, 0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5500, before[1]))  # inside of the sixth row
    try:
        for step in range(10, 20):
            sink.write({"step": step, "text": "x" * 1000})
            sink.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.stat().st_size == 5500
    sink.write({"step": 20})
    sink.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [*range(10, 21)]
    assert capfd.readouterr().err.count(f"{path}: ") == 1


def test_rows_without_a_schema_are_read_and_those_of_a_later_one_are_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "schema": 1, "loss": 1.0}\n')
    assert [row["loss"] for row in read_rows(path, schema=1)] == [2.0, 1.0]
    assert not capfd.readouterr().err
    path.write_text('{"step": 3, "schema": 7}\n')
    assert [row["step"] for row in read_rows(path, schema=1)] == [3]
    assert re.search(r"metrics\.jsonl: 1 rows .* 7, .* 1:", capfd.readouterr().err)


def test_rows_after_the_resumed_step_and_a_torn_line_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(json.dumps({"step": s}) + "\n" for s in range(1, 8)) + '{"step": 8, "lo'
    )
    sink = JsonlSink(path, resume_step=5)
    sink.write({"step": 6, "again": True})
    sink.close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["step"] for r in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[-1]["again"]


FOREIGN = ["[1, 2]", "3", "null", '"text"', "{}", '{"step": "x"}', '{"step": true}', "[" * 100_000]


def test_F108_a_foreign_line_costs_itself_and_one_warning(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(['{"step": 1, "loss": 2.0}', *FOREIGN, '{"step": 2}', '{"st']))
    sink = BackgroundSink(lambda: JsonlSink(path, 2), "metrics.jsonl")
    sink.write({"step": 3})
    end_all([sink], 60)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    assert "metrics.jsonl: 7 lines " in err
    path.write_text('{"step": 1, "loss": 2.0}\n[1]\n')
    assert list(read_rows(path)) == [{"step": 1, "loss": 2.0}]
    assert "metrics.jsonl: 1 lines " in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_the_file_of_an_id_is_named_where_its_run_is_gone_and_made_again_where_it_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    for name in ("MLFLOW_ALLOW_FILE_STORE", "MLFLOW_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "config.toml").write_text("[train]\nsteps = 1\n")
    (tmp_path / "mlflow.id").write_text("")
    MlflowSink(tmp_path, 0).close()
    assert len((tmp_path / "mlflow.id").read_text().strip()) == 32
    (tmp_path / "mlflow.id").write_text("0" * 32)
    with rejects("run", "0" * 32, "not_found", where=tmp_path / "mlflow.id"):
        MlflowSink(tmp_path, 0)
