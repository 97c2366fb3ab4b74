"""Events survive kills and full disks; they never stop a run."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from forge_resilience import Journal, read_events


def test_an_event_has_time_process_and_fields(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "events.jsonl")
    journal.record("save", step=3, seconds=0.5, path=tmp_path)
    (event,) = read_events(tmp_path / "events.jsonl")
    assert (event["event"], event["step"], event["seconds"]) == ("save", 3, 0.5)
    assert event["path"] == str(tmp_path)
    assert event["pid"] > 0
    assert datetime.fromisoformat(event["time"]).utcoffset() == timedelta(0)


def test_a_torn_line_costs_itself_alone(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    Journal(path).record("start")
    with path.open("a") as file:
        file.write('{"event": "sa')
    assert [e["event"] for e in read_events(path)] == ["start"]
    Journal(path).record("resume")
    assert [e["event"] for e in read_events(path)] == ["start", "resume"]


def test_a_disk_that_cannot_be_written_is_one_line_and_no_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    journal = Journal(tmp_path / "file/events.jsonl")
    journal.record("start")
    journal.record("save")
    assert capfd.readouterr().err.count("\n") == 1


def test_a_missing_journal_is_empty(tmp_path: Path) -> None:
    assert list(read_events(tmp_path / "none.jsonl")) == []


def test_lines_of_two_writers_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    a, b = Journal(path), Journal(path)
    for i in range(50):
        a.record("a", i=i)
        b.record("b", i=i)
    assert [json.loads(line)["i"] for line in path.read_text().splitlines()] == sorted(
        [*range(50), *range(50)]
    )
