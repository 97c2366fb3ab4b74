"""A sink that fails, hangs or is slow costs rows, never steps."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from forge_resilience import recorder
from forge_resilience.recorder import BackgroundSink, end_all

pytestmark = pytest.mark.lane("test")


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
    end_all([sink], 60)
    assert inner.rows == [{"step": step} for step in range(100)] + ["closed"]


def test_a_failing_sink_is_switched_off_with_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    class Failing(Recording):
        def write(self, row: Any) -> None:
            raise OSError(28, "No space left on device")

    sink = BackgroundSink(Failing, "full disk")
    for step in range(5):
        sink.write({"step": step})
        assert sink.flush()
    end_all([sink], 60)
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    assert "full disk" in err
    assert "No space left" in err


def test_a_sink_that_exits_is_switched_off_with_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    class Leaving(Recording):
        def write(self, row: Any) -> None:
            raise SystemExit(3)

    sink = BackgroundSink(Leaving, "mine")
    sink.write({"step": 1})
    assert sink.flush()  # answered, so that no save waits for it
    end_all([sink], 10.0)
    assert "mine: SystemExit: 3;" in capfd.readouterr().err


def test_a_sink_that_cannot_open_is_switched_off_too(capfd: pytest.CaptureFixture[str]) -> None:
    def refuse() -> Any:
        raise ModuleNotFoundError("No module named 'tensorboard'")

    sink = BackgroundSink(refuse, "tensorboard")
    sink.write({"step": 1})
    end_all([sink], 60)
    assert "No module named 'tensorboard'" in capfd.readouterr().err


class Hanging(Recording):
    """Hangs in each write until `go` is set."""

    def __init__(self, go: threading.Event, entered: threading.Event) -> None:
        super().__init__()
        self.go, self.entered = go, entered

    def write(self, row: Any) -> None:
        self.entered.set()
        self.go.wait()
        super().write(row)


def hanging(max_rows: int = 1024) -> tuple[BackgroundSink, threading.Event]:
    """A sink that hangs in its first row, and the event that frees it."""
    go, entered = threading.Event(), threading.Event()
    sink = BackgroundSink(lambda: Hanging(go, entered), "slow", max_rows)
    sink.write({"step": 0})
    assert entered.wait(60)
    return sink, go


def test_a_hanging_sink_drops_rows_and_never_blocks(capfd: pytest.CaptureFixture[str]) -> None:
    sink, go = hanging(max_rows=4)
    for step in range(1, 50):
        sink.write({"step": step})
    assert sink.dropped == 45
    assert not sink.flush(timeout_seconds=0.01)
    go.set()
    end_all([sink], 60)
    assert "45 rows dropped" in capfd.readouterr().err


def test_a_hanging_sink_is_flushed_once_until_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    class Counted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0.0)
            return super().wait(60 if go.is_set() else 0.001)

    sink, go = hanging()
    monkeypatch.setattr(recorder.threading, "Event", Counted)
    for _ in range(4):
        assert not sink.flush()  # as at saves
    assert waits == [5.0]
    go.set()
    assert sink._last_flush is not None
    assert sink._last_flush.wait(60)
    assert sink.flush()
    end_all([sink], 60)


def test_hanging_sinks_share_one_wait_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    sinks, frees = zip(*(hanging() for _ in range(3)))
    clock, waits = [100.0], list[float]()

    def join(timeout: float) -> None:
        waits.append(timeout)
        clock[0] += min(timeout, 4.0)  # the first two take 4 s each

    monkeypatch.setattr(recorder, "monotonic", lambda: clock[0])
    for sink in sinks:
        monkeypatch.setattr(sink._thread, "join", join)
    end_all(sinks, 6.0)
    assert waits == [6.0, 2.0, 0.0]
    assert capfd.readouterr().err.count("slow: ") == 3
    for go in frees:
        go.set()


def test_a_sink_is_opened_again_after_its_rows_without_a_wait() -> None:
    first, second = Recording(), Recording()
    go = threading.Event()

    def slow() -> Recording:
        go.wait()
        return first

    sink = BackgroundSink(slow, "reopened")
    sink.write({"step": 1})
    sink.reopen(lambda: second)  # as at a rollback
    sink.write({"step": 2})
    assert not first.rows + second.rows
    go.set()
    end_all([sink], 60)
    assert first.rows == [{"step": 1}, "closed"]
    assert second.rows == [{"step": 2}, "closed"]
