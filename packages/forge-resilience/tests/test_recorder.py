"""Recorder: sinks that are opened again after a step, saves that take long, and lines for a person."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forge_resilience import read_events
from forge_resilience.console import ConsoleSink, console_mode
from forge_resilience.goodput import life_fields
from forge_resilience.recorder import Recorder
from forge_resilience.sinks import JsonlSink, last_row, read_rows

pytestmark = pytest.mark.lane("test")


def test_sinks_go_on_after_the_step_they_are_opened_with(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    recorder = Recorder(tmp_path / "events.jsonl", {"rows": partial(JsonlSink, path)}, 0)
    for step in (1, 2, 3):
        recorder.write({"step": step, "lr": 0.5 if step < 3 else None, "seconds": 2.0 * step})
    recorder.flush()
    assert last_row(path)["step"] == 3  # type: ignore[index]
    assert last_row(path, column="lr")["step"] == 2  # type: ignore[index]
    assert last_row(path, 0) is None
    found = life_fields(path, 1, 1.5)
    assert (found["reached"]["step"], found["steps_lost"], found["seconds_lost"]) == (3, 2, 4.5)

    recorder.reopen(1)
    recorder.close()
    assert [row["step"] for row in read_rows(path)] == [1]
    assert life_fields(tmp_path / "none", 1, 1.5).keys() == {"began"}


def test_a_save_over_its_limit_is_an_event_with_a_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recorder, silent = Recorder(tmp_path / "events.jsonl", {}, 0), Recorder(None, {}, 0)
    event = SimpleNamespace(kind="committed", step=4, seconds=3.0, error="", failures=0)
    recorder.record_save(event, limit=5.0)
    silent.record_save(event, limit=1.0)
    assert not capfd.readouterr().err
    recorder.record_save(event, limit=1.0)
    assert "step 4" in capfd.readouterr().err
    event = SimpleNamespace(kind="failed", step=5, seconds=3.0, error="full", failures=2)
    recorder.record_save(event, limit=1.0)
    recorder.close()
    saves = [(e["event"], e.get("limit"), e.get("failures")) for e in read_events(tmp_path / "events.jsonl")]  # fmt: skip
    assert saves == [("save", None, None), ("save", 1.0, None), ("save_failed", None, 2)]


ROW: dict[str, Any] = {
    "step": 2,
    "loss": 3.25,
    "val_loss": None,
    "grad_norm": None,
    "lr": 1e-3,
    "tokens_per_second": 25_000.0,
    "mfu": None,
    "data_wait_seconds": 0.0,
    "memory_bytes": 2**30,
    "seconds_left": 90.0,
    "skipped_steps": 1,
}


def test_a_row_is_a_line_for_a_person(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    assert console_mode("off") is None
    assert console_mode("plain") == console_mode("auto") == "plain"
    sink = ConsoleSink("plain", 0, 8)
    sink.write(ROW)
    sink.write(ROW | {"lr": None, "seconds_left": None, "val_loss": 4.0})
    sink.close()
    first, second = capsys.readouterr().out.splitlines()
    for text in ("step 2/8", "loss 3.2500", "grad not finite", "25.0k tok/s", "left 0:01:30", "skipped 1"):  # fmt: skip
        assert text in first
    assert "val 4.0000" in second
