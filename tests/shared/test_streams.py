"""The shared topic `streams`, by its master, which imports in no time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = """
import os, sys
from streams import tolerate
tolerate()
for _ in range(3):
    print("a" * 10000, flush=True)
print("end", file=sys.stderr)
"""


_MASTERS = Path(__file__).resolve().parents[2] / "scripts/shared"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(_MASTERS))


def test_F186_output_that_cannot_be_written_is_lost_with_one_line() -> None:
    command = [sys.executable, "-c", _PROGRAM]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, text=True, stderr=subprocess.PIPE, stdout=full)
    assert done.returncode == 0
    lines = done.stderr.splitlines()
    assert (len(lines), lines[-1]) == (2, "end")


def test_output_that_has_lost_its_reader_is_lost() -> None:
    command = [sys.executable, "-c", _PROGRAM]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == "end\n"
    assert process.wait() == 0


def test_no_file_gets_the_number_of_a_stream_that_is_closed(tmp_path: Path) -> None:
    program = _PROGRAM.replace("for _", f"file = open({str(tmp_path / 'a')!r}, 'w')\nfor _")
    script = '"$0" -c "$1" <&- 2>&- >/dev/full'
    done = subprocess.run(["bash", "-c", script, sys.executable, program])
    assert (done.returncode, (tmp_path / "a").read_text()) == (0, "")


def test_streams_that_are_closed_and_a_pipe_that_is_full() -> None:
    script = _PROGRAM
    closed = subprocess.run(
        ["bash", "-c", '"$0" -c "$1" >&- 2>&-; echo $?', sys.executable, script],
        capture_output=True,
        text=True,
    )
    assert closed.stdout == "0\n"
    process = subprocess.Popen(
        [sys.executable, "-c", "import os; os.set_blocking(1, False)\n" + script.replace("(3)", "(9)")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    err = process.stderr.read()  # nobody reads stdout
    assert (process.wait(), err.endswith("end\n")) == (0, True)
    assert process.stdout is not None
    process.stdout.close()
