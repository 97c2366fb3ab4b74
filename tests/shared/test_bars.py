"""A bar is drawn on a terminal, and nothing at all is written into a pipe."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.lane("test")

PROGRAM = """
import runpy, sys
if sys.argv[2:]:
    sys.modules["rich"] = sys.modules["rich.console"] = None  # not installed
bar = runpy.run_path(sys.argv[1])["progress_bar"]
with bar("verify") as show:
    for done in range(0, 5001, 1000):
        show(done, 5000)
"""
MASTER = Path(__file__).parents[2] / "scripts/shared/bars.py"


def written(stderr: int, *more: str) -> None:
    command = [sys.executable, "-c", PROGRAM, str(MASTER), *more]
    environ = {**os.environ, "FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "80"}
    done = subprocess.run(command, stderr=stderr, stdout=subprocess.PIPE, env=environ)
    assert (done.returncode, done.stdout) == (0, b"")


def on_terminal(*more: str) -> bytes:
    ours, theirs = pty.openpty()
    try:
        written(theirs, *more)
        os.write(theirs, b"END")
        found = b""
        while not found.endswith(b"END"):
            found += os.read(ours, 65536)
        return found.removesuffix(b"END")
    finally:
        os.close(ours)
        os.close(theirs)


def test_a_terminal_shows_a_bar_that_is_gone_at_the_end() -> None:
    found = on_terminal()
    assert b"verify" in found
    assert b"5.0/5.0 kB" in found
    assert found.rstrip().endswith(b"\x1b[2K")  # the line is erased


def test_a_pipe_gets_no_byte() -> None:
    ours, theirs = os.pipe()
    written(theirs)
    os.close(theirs)
    with open(ours, "rb") as pipe:
        assert pipe.read() == b""


def test_without_rich_nothing_is_shown() -> None:
    assert on_terminal("absent") == b""
