"""A run whose terminal goes away: it saves, leaves with 75, and goes on with the same command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from forge_testing import wait_for_step, write_job
from forge_train import read_run


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [[], ["--nproc", "2"]])
def test_F108_a_run_whose_terminal_goes_saves_and_leaves(tmp_path: Path, nproc: list[str]) -> None:
    job = write_job(tmp_path)
    terminal, line = os.openpty()
    log = tmp_path / "log"
    command = [sys.executable, "-m", "forge_train", "run", str(job), "--train.steps", "100000"]
    with log.open("w") as file:
        process: subprocess.Popen[str] = subprocess.Popen(
            [*command, "--metrics.console", "live", *nproc],
            stdin=line, stdout=line, stderr=file if not nproc else line, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    os.close(line)
    os.set_blocking(terminal, False)
    wait_for_step(process, tmp_path / "run/metrics.jsonl", 3)
    os.close(terminal)  # output is an error from here on
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=100) == 75, log.read_text()
    assert "Traceback" not in log.read_text()
    events = read_run(tmp_path / "run").events
    assert [(e["event"], e.get("signal")) for e in events[-2:]] == [
        ("save", None),
        ("stop", "SIGHUP"),
    ]
