"""The shared topic `jsonl`, by the copy of one package."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
from functools import partial
from pathlib import Path

import pytest

from forge_data import InvalidData
from forge_data._shared.jsonl import append_line, parse, read_log
from forge_testing.problems import rejects
from forge_testing.processes import exit_code, forked

pytestmark = pytest.mark.lane("test")


def test_text_and_bytes_of_json_with_a_mark_at_the_start() -> None:
    for content in ('{"a": "é"}', '{"a": "é"}'.encode(), '{"a": "é"}'.encode("utf-8-sig")):
        assert parse(content, "here") == {"a": "é"}


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b'{"a": "\xff"}', "encoding"),
        ('{"a": 1}'.encode("utf-16"), "encoding"),
        ("[" * 100_000, "depth"),
        (b"[" * 100_000, "depth"),
        ("", "not_json"),
        ("{}{}", "not_json"),
        (b'{"a"', "not_json"),
        ("1" * 5000, "not_json"),
    ],
)
def test_a_mistake_names_the_line_in_one_line(content: str | bytes, code: str) -> None:
    with rejects("", ..., code, InvalidData, where="a.jsonl line 3: ") as error:
        parse(content, "a.jsonl line 3", InvalidData, "fix it so")
    assert "\n" not in str(error.value)
    assert ("fix it so" in str(error.value)) == (code != "encoding")
    assert len(str(error.value)) < 300


def test_torn_lines_of_a_log_are_left_out(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert list(read_log(log)) == []
    append_line(log, {"a": 1})
    with log.open("ab") as file:
        file.write(b'{"torn": "\xc3')
    append_line(log, {"path": tmp_path})
    with log.open("ab") as file:
        file.write(b"[" * 100_000 + b"\n\n2")
    assert list(read_log(log)) == [{"a": 1}, {"path": str(tmp_path)}, 2]


def test_lines_of_several_writers_do_not_mix(tmp_path: Path) -> None:
    def write(name: str) -> None:
        for number in range(100):
            append_line(tmp_path / "log", [name * 500, number])

    pids = [forked(partial(write, name)) for name in "abc"]
    assert [exit_code(pid) for pid in pids] == [0, 0, 0]
    found = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    wanted = sorted([name * 500, number] for name in "abc" for number in range(100))
    assert sorted(found) == wanted


def test_a_line_that_finds_no_room_is_an_error_and_later_ones_are_read(tmp_path: Path) -> None:
    def full() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20))
        append_line(tmp_path / "log", 1)
        with pytest.raises(OSError, match=str(errno.ENOSPC)):
            append_line(tmp_path / "log", "x" * 50)

    assert exit_code(forked(full)) == 0
    append_line(tmp_path / "log", 2)
    assert list(read_log(tmp_path / "log")) == [1, 2]


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="/fifo"):
        append_line(tmp_path / "fifo", 1)
    with rejects("", ..., "not_a_file", where="fifo"):
        list(read_log(tmp_path / "fifo"))
    with pytest.raises(ValueError, match="float"):  # prose: of json
        append_line(tmp_path / "log", float("nan"))
