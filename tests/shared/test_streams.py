"""The shared topic `streams`, by its master, which imports in no time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = """
import os, sys
from streams import tolerate
tolerate(is_work={is_work})
for _ in range(3):
    print("a" * 10000, flush=True)
print("end", file=sys.stderr)
"""


_MASTERS = Path(__file__).resolve().parents[2] / "scripts/shared"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(_MASTERS))


def test_F186_output_that_cannot_be_written_is_lost_with_one_line() -> None:
    command = [sys.executable, "-c", _PROGRAM.format(is_work=False)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, text=True, stderr=subprocess.PIPE, stdout=full)
    assert done.returncode == 0
    lines = done.stderr.splitlines()
    assert (len(lines), lines[-1]) == (2, "end")


@pytest.mark.parametrize("is_work", [True, False])
def test_a_closed_pipe_ends_a_command_that_only_prints(is_work: bool) -> None:
    command = [sys.executable, "-c", _PROGRAM.format(is_work=is_work)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    err = process.stderr.read()
    assert process.wait() == (0 if is_work else 1)
    assert ("BrokenPipeError" in err, err.endswith("end\n")) == (not is_work, is_work)


def test_streams_that_are_closed_and_a_pipe_that_is_full() -> None:
    script = _PROGRAM.format(is_work=True)
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
