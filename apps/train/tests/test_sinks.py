"""A sink that fails, hangs or is slow costs rows, never steps."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from forge_train import read_run
from forge_train.metrics import sinks
from forge_train.metrics.sinks import BackgroundSink, JsonlSink


class Recording:
    def __init__(self) -> None:
        self.rows: list[Any] = []

    def write(self, row: Any) -> None:
        self.rows.append(row)

    def close(self) -> None:
        self.rows.append("closed")


def test_rows_arrive_in_order_and_close_flushes() -> None:
    inner = Recording()
    sink = BackgroundSink(lambda: inner, "recording")
    for step in range(100):
        sink.write({"step": step})
    sink.close()
    assert inner.rows == [{"step": step} for step in range(100)] + ["closed"]


def test_a_failing_sink_is_switched_off_with_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    class Failing(Recording):
        def write(self, row: Any) -> None:
            raise OSError(28, "No space left on device")

    sink = BackgroundSink(Failing, "full disk")
    for step in range(5):
        sink.write({"step": step})
        assert sink.flush()
    sink.close()
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    assert "full disk" in err
    assert "No space left" in err


def test_a_sink_that_cannot_open_is_switched_off_too(capfd: pytest.CaptureFixture[str]) -> None:
    def refuse() -> Any:
        raise ModuleNotFoundError("No module named 'tensorboard'")

    sink = BackgroundSink(refuse, "tensorboard")
    sink.write({"step": 1})
    sink.close()
    assert "No module named 'tensorboard'" in capfd.readouterr().err


def test_a_hanging_sink_drops_rows_and_never_blocks(capfd: pytest.CaptureFixture[str]) -> None:
    go, entered = threading.Event(), threading.Event()

    class Hanging(Recording):
        def write(self, row: Any) -> None:
            entered.set()
            go.wait()

    sink = BackgroundSink(Hanging, "slow", max_rows=4)
    sink.write({"step": 0})
    assert entered.wait(10)
    for step in range(1, 50):
        sink.write({"step": step})
    assert sink.dropped == 45
    assert not sink.flush(timeout_seconds=0.01)
    go.set()
    sink.close()
    assert "45 rows dropped" in capfd.readouterr().err


def test_a_hanging_sink_is_waited_for_once_until_it_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []

    class Counted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0.0)
            return super().wait(10 if go.is_set() else 0.001)

    go, entered = threading.Event(), threading.Event()

    class Hanging(Recording):
        def write(self, row: Any) -> None:
            entered.set()
            go.wait()

    sink = BackgroundSink(Hanging, "slow")
    monkeypatch.setattr(sinks.threading, "Event", Counted)
    monkeypatch.setattr(sink._thread, "join", lambda timeout: waits.append(timeout))
    sink.write({"step": 0})
    assert entered.wait(10)
    for _ in range(4):
        assert not sink.flush()  # as at saves
    sink.close()
    assert waits == [5.0]
    go.set()
    assert sink._last_flush is not None
    assert sink._last_flush.wait(10)
    waits.clear()
    assert sink.flush()
    sink.close()
    assert waits == [5.0, 5.0, 5.0]  # it answers again: a flush, and those of the close


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
    sink.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    assert "metrics.jsonl: 7 lines that are no rows of metrics were left out" in err
    path.write_text('{"step": 1, "loss": 2.0}\n[1]\n')
    (tmp_path / "config.toml").write_text("")
    (tmp_path / "environment.json").write_text("{}")
    assert read_run(tmp_path).metrics == {"step": [1], "loss": [2.0]}
    assert "1 lines that are no rows" in capfd.readouterr().err
