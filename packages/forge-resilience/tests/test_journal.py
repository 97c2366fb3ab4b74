"""Events survive kills and full disks; they never stop a run."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import torch

from forge_resilience import Journal, read_events
from forge_resilience._shared.jsonl import read_log_from
from forge_resilience.supervise import supervise
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")


def test_an_event_has_time_process_and_fields(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "events.jsonl")
    journal.record("save", step=3, seconds=0.5, path=tmp_path)
    (event,) = read_events(tmp_path / "events.jsonl")
    assert (event["event"], event["step"], event["seconds"]) == ("save", 3, 0.5)
    assert event["path"] == str(tmp_path)
    assert event["pid"] > 0
    assert datetime.fromisoformat(event["time"]).utcoffset() == timedelta(0)


def test_a_torn_line_costs_only_itself(tmp_path: Path) -> None:
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


def test_it_goes_on_when_the_disk_is_back(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "later/events.jsonl")
    journal.record("lost")
    (tmp_path / "later").mkdir()
    journal.record("kept")
    assert [e["event"] for e in read_events(tmp_path / "later/events.jsonl")] == ["kept"]


FULL_DISK = """
import resource, signal, sys
from forge_resilience import Journal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
journal = Journal(sys.argv[1])
for step in range(50):
    journal.record("save", step=step, text="x" * 50)
"""


def test_a_disk_that_fills_in_the_middle_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    command = [sys.executable, "-c", FULL_DISK, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.count("\n")) == (0, 1)
    assert path.stat().st_size == 1000  # it did stop inside a line
    steps = [event["step"] for event in read_events(path)]
    assert steps == list(range(len(steps)))
    assert len(steps) > 3
    Journal(path).record("resume", step=-1)
    assert [event["step"] for event in read_events(path)] == [*steps, -1]


def test_values_that_json_lacks_leave_the_line_readable(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    Journal(path).record("nonfinite", loss=math.nan, norms=[math.inf], table={1: 2})
    (event,) = (json.loads(line, parse_constant=pytest.fail) for line in path.open())
    assert (event["loss"], event["norms"], event["table"]) == (None, [None], {"1": 2})


def test_F112_tensors_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    Journal(path).record(
        "step",
        loss=torch.tensor(1.5, dtype=torch.bfloat16, requires_grad=True),
        norms=[torch.tensor(0.5), torch.tensor([2.0, math.nan])],
        counts=torch.arange(3),
        weights=torch.zeros(100, 100),
    )
    (event,) = (json.loads(line, parse_constant=pytest.fail) for line in path.open())
    assert (event["loss"], event["norms"], event["counts"]) == (1.5, [0.5, [2.0, None]], [0, 1, 2])
    assert event["weights"].startswith("tensor(")
    assert path.stat().st_size < 1000


def test_a_value_that_contains_itself_is_no_reason_to_stop(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    loop: list[object] = []
    loop.append(loop)
    journal = Journal(tmp_path / "events.jsonl")
    journal.record("odd", value=loop)
    journal.record("next")
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"{journal.path}: ")
    assert [e["event"] for e in read_events(journal.path)] == ["next"]


def test_F112_fields_cannot_replace_rank_and_time_and_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    Journal(path).record("stop", pid=-1, time="never", event="own", self=1)
    (event,) = read_events(path)
    assert event["pid"] == os.getpid()
    assert event["time"] != "never"
    assert event["event"] == "stop"
    own = {name: event[name] for name in ("pid_", "time_", "event_", "self")}
    assert own == {"pid_": -1, "time_": "never", "event_": "own", "self": 1}


def test_lines_of_two_writers_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    a, b = Journal(path), Journal(path)
    for i in range(50):
        a.record("a", i=i)
        b.record("b", i=i)
    assert [json.loads(line)["i"] for line in path.read_text().splitlines()] == sorted(
        [*range(50), *range(50)]
    )


def test_a_log_is_read_on_from_an_offset_and_a_line_without_an_end_later(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b'{"a": 1}\ntorn\n{"b": "\xc3\xa9"}\n{"c": ')
    first = list(read_log_from(path, 0))
    assert first == [({"a": 1}, 9), ({"b": "é"}, 26)]
    assert list(read_log_from(path, 26)) == []
    with path.open("ab") as file:
        file.write(b"3}\n4")
    assert list(read_log_from(path, 26)) == [({"c": 3}, 35), (4, 36)]


def test_F149_a_journal_is_a_regular_file_of_the_home_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    Journal("~/[a].jsonl").record("start")
    Journal(None).record("start")  # of a rank other than 0
    assert [e["event"] for e in read_events("~/[a].jsonl")] == ["start"]
    assert (tmp_path / "[a].jsonl").is_file()
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path):
        with rejects("", ..., "not_a_file", where=path):
            list(read_events(path))
        with rejects("", ..., "not_a_file", where=path):  # nothing is started
            supervise(["touch", str(tmp_path / "started")], journal=path)
    assert not (tmp_path / "started").exists()
