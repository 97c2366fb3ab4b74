"""Events reach a command and a webhook, once; whatever fails there costs the run nothing and shows no secret."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from forge_resilience import Journal, read_events
from forge_resilience.alerts import Alerts, AlertsConfig, _Follower
from forge_testing.durability import synced_renames
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")


def wait_until(true: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)  # polling


class Receiver(ThreadingHTTPServer):
    """A webhook on loopback: bodies that it got, and the codes that it answers, the last one for ever."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.got: list[dict[str, Any]] = []
        self.codes = [200]
        self.seconds = 0.0
        self.url = f"http://127.0.0.1:{self.server_port}/hook/s3cret"


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.path == "/hook/s3cret"
        self.server.got.append(json.loads(body))
        time.sleep(self.server.seconds)
        code = self.server.codes.pop(0) if len(self.server.codes) > 1 else self.server.codes[0]
        self.send_response(code)
        if code == 302:
            self.send_header("Location", self.server.url.replace("hook", "elsewhere"))
        self.end_headers()

    def do_GET(self) -> None:
        raise AssertionError("a redirect was followed")

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "events.jsonl")


def failures(journal: Journal) -> list[dict[str, Any]]:
    return [event for event in read_events(journal.path) if event["event"] == "alert_failed"]


def noting(folder: Path, then: str = "") -> str:
    """A command that appends what it got to a file."""
    script = folder / "note.sh"
    script.write_text(
        f'#!/bin/bash\nread -r line\necho "$1 | $2 | $line" >> {folder}/notes\n{then}\n'
    )
    return f"bash {script} 'two words'"


def notes(folder: Path) -> list[str]:
    path = folder / "notes"
    return path.read_text().splitlines() if path.exists() else []


def test_F187_a_journal_that_is_a_fifo_has_no_events(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "events.jsonl")
    follower = _Follower(tmp_path / "events.jsonl", AlertsConfig(), 0)
    follower._send_new()
    assert follower.offset == 0


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_new_events_reach_both_ways_once_and_others_none(
    tmp_path: Path, receiver: Receiver, journal: Journal
) -> None:
    journal.record("stop", step=1)  # of an earlier life, before anybody followed
    config = AlertsConfig(noting(tmp_path), receiver.url)
    with Alerts(journal.path, config):
        journal.record("save", step=2)
        journal.record("mismatch", step=3, rank=1, tensor="fc.weight")
        wait_until(lambda: receiver.got)
        with journal.path.open("a") as file:  # a line that is not whole yet
            file.write('{"event": "hang", ')
            file.flush()
            time.sleep(0.6)  # more than one look
            file.write('"rank": 2}\n')
        journal.record("done")
    texts = [got["text"] for got in receiver.got]
    assert texts == [
        f"{tmp_path}: mismatch, step 3, rank 1, tensor fc.weight",
        f"{tmp_path}: hang, rank 2",
    ]
    assert receiver.got[0]["event"]["tensor"] == "fc.weight"
    said = [note.split(" | ") for note in notes(tmp_path)]
    assert [(first, text) for first, text, _ in said] == [("two words", text) for text in texts]
    assert json.loads(said[0][2])["step"] == 3
    assert failures(journal) == []


def test_the_next_attempt_sends_what_was_written_between(
    tmp_path: Path, receiver: Receiver, journal: Journal
) -> None:
    """By a supervisor, which killed the follower together with the ranks."""
    config = AlertsConfig(webhook=receiver.url)
    for step in (1, 2):
        with Alerts(journal.path, config):
            journal.record("spike", step=step)
        journal.record("hang", step=step)
    with Alerts(journal.path, config):
        pass
    said = [(got["event"]["event"], got["event"]["step"]) for got in receiver.got]
    assert said == [("spike", 1), ("hang", 1), ("spike", 2), ("hang", 2)]


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.parametrize("codes", [[500, 200], [500], [302]])
def test_a_webhook_that_fails_is_tried_a_few_times_and_not_named(
    receiver: Receiver, journal: Journal, codes: list[int]
) -> None:
    receiver.codes = list(codes)
    with Alerts(journal.path, AlertsConfig(webhook=receiver.url, attempts=2), close_seconds=30):
        journal.record("stop")
    assert len(receiver.got) == 2
    wanted = [] if codes[-1] == 200 else [("stop", "webhook", f"answered {codes[-1]}")]
    assert [(f["of"], f["way"], f["cause"]) for f in failures(journal)] == wanted
    assert {f["attempts"] for f in failures(journal)} <= {2}
    assert "s3cret" not in journal.path.read_text()


@pytest.mark.lane("quick")
def test_a_webhook_without_an_answer_and_without_a_server(
    receiver: Receiver, journal: Journal
) -> None:
    receiver.seconds = 5.0
    config = AlertsConfig(webhook=receiver.url, timeout_seconds=0.2, attempts=1)
    with Alerts(journal.path, config):
        journal.record("stop")
    gone = AlertsConfig(webhook="http://127.0.0.1:9/s3cret", attempts=1)
    with Alerts(journal.path, gone):
        journal.record("hang")
    causes = [f["cause"].split()[-1] for f in failures(journal)]
    assert causes == ["TimeoutError", "ConnectionRefusedError"]
    assert "s3cret" not in journal.path.read_text()


def test_the_url_may_be_in_the_environment(
    receiver: Receiver, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_HOOK", receiver.url)
    with Alerts(journal.path, AlertsConfig(webhook="$MY_HOOK")):
        journal.record("stop")
    assert len(receiver.got) == 1
    with Alerts(journal.path, AlertsConfig(webhook="$NO_HOOK", attempts=1)):
        journal.record("stop")
    (failure,) = failures(journal)
    assert "NO_HOOK" in failure["cause"]


@pytest.mark.slow
def test_a_command_that_hangs_is_killed_with_its_children(tmp_path: Path, journal: Journal) -> None:
    command = noting(tmp_path, f"sleep 600 & echo $! > {tmp_path}/pid; wait")
    config = AlertsConfig(command, timeout_seconds=1.0, attempts=2)
    began = time.monotonic()
    with Alerts(journal.path, config, close_seconds=30):
        journal.record("stop")
        assert time.monotonic() - began < 5  # the run does not wait
    (failure,) = failures(journal)
    assert " 1 s " in failure["cause"]
    assert len(notes(tmp_path)) == 2
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not Path(f"/proc/{pid}").exists() or " Z " in Path(f"/proc/{pid}/stat").read_text())  # fmt: skip


@pytest.mark.parametrize(
    ("command", "cause"),
    [("bash -c 'exit 3'", "3"), ("/no/such --token s3cret", "FileNotFoundError")],
)
def test_a_command_that_fails_is_reported_without_its_arguments(
    journal: Journal, command: str, cause: str
) -> None:
    with Alerts(journal.path, AlertsConfig(command, attempts=1)):
        journal.record("stop")
    (failure,) = failures(journal)
    assert failure["cause"].split()[-1] == cause
    assert "s3cret" not in journal.path.read_text()


def test_many_events_of_a_kind_are_sent_ten_times(receiver: Receiver, journal: Journal) -> None:
    with Alerts(journal.path, AlertsConfig(webhook=receiver.url)):
        for step in range(50):
            journal.record("spike", step=step)
        journal.record("stop")
    assert [got["event"]["event"] for got in receiver.got] == ["spike"] * 10 + ["stop"]
    assert ["events.jsonl" in got["text"] for got in receiver.got[:10]] == [False] * 9 + [True]


KILLED = """
import os, signal, sys
from forge_resilience import Journal
from forge_resilience.alerts import Alerts, AlertsConfig
with Alerts(sys.argv[1], AlertsConfig(webhook=sys.argv[2])) as alerts:
    Journal(sys.argv[1]).record("fault", step=7)
    print(alerts._process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_is_reported_and_leaves_no_process(receiver: Receiver, journal: Journal) -> None:  # fmt: skip
    command = [sys.executable, "-c", KILLED, str(journal.path), receiver.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL
    wait_until(lambda: [got["event"]["step"] for got in receiver.got] == [7])
    wait_until(lambda: not _runs(int(done.stdout)))


def _runs(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def test_F178_the_offset_in_the_journal_is_replaced_atomically(journal: Journal) -> None:
    follower = _Follower(journal.path, AlertsConfig(), 0)
    with synced_renames() as moved:
        for _ in range(2):
            journal.record("step")
            follower._send_new()
    assert moved == ["events.jsonl.alerts"] * 2
    assert int(follower.state.read_text()) == journal.path.stat().st_size


def test_without_command_and_webhook_nothing_starts(journal: Journal) -> None:
    with Alerts(journal.path, AlertsConfig()) as alerts:
        journal.record("stop")
    assert alerts._process is None
    assert os.listdir(journal.path.parent) == ["events.jsonl"]


@pytest.mark.parametrize(
    ("key", "given", "value", "code"),
    [
        ("command", "notify 'me", ..., "words"),
        ("command", " ", ..., "words"),
        ("webhook", "ftp://s3cret", ..., "format"),
        ("events", (), [], "format"),
        ("timeout_seconds", 0.0, 0.0, "range"),
        ("attempts", 0, 0, "range"),
    ],
)
def test_configurations_name_rule_and_fix_and_no_secret(key: str, given: Any, value: Any, code: str) -> None:  # fmt: skip
    with rejects(key, value, code) as error:
        AlertsConfig(**{key: given})
    assert "s3cret" not in str(error.value)
