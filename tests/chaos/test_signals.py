"""Stop signals that the strikers of forge_resilience place: while ranks import, a thousand during a save."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from forge_resilience.chaos import PROCESS_KINDS, CommandLife, Fault, Injector
from forge_resilience.heartbeat import FOLDER
from forge_testing import forge_train, write_job
from forge_train import read_run

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def test_a_thousand_signals_during_a_save_save_once(tmp_path: Path) -> None:
    job, beats = write_job(tmp_path), tmp_path / "beats"
    beats.mkdir()
    flags = (
        "--train.steps",
        "100000",
        "--checkpoint.every_steps",
        "2",
        "--checkpoint.wait",
        "true",
    )
    command = [sys.executable, "-m", "forge_train", "run", str(job), "--nproc", "2", *flags]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", FOLDER: str(beats)}
    life = CommandLife(command, environ, tmp_path / "log")
    fault = Fault(0, "storm", "save", rank=1, entry=3, fraction=0.5, seed=4)
    struck = Injector(beats).inject(life, fault, PROCESS_KINDS["storm"])
    assert struck is not None
    deadline = time.monotonic() + 100
    while life.poll() is None or life.living():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    log = (tmp_path / "log").read_text()
    assert life.poll() == 75, log
    assert "Traceback" not in log
    events = read_run(tmp_path / "run").events
    stop = events[-1]
    assert stop["event"] == "stop"
    saves = [e["step"] for e in events if e["event"] == "save"]
    assert saves[-1] == stop["step"]
    assert len(saves) == len(set(saves)), "saved twice"
    again = forge_train("run", job, "--train.steps", str(stop["step"] + 2))
    assert again.code == 0, again.err


@pytest.mark.parametrize("fraction", [0.6])
def test_a_signal_in_the_middle_of_imports_ends_with_the_requeue_code(
    tmp_path: Path, fraction: float
) -> None:
    """Nothing is lost yet, and no import is left half-made: 75, whichever rank has its handler already."""
    job, beats, log = write_job(tmp_path), tmp_path / "beats", tmp_path / "log"
    beats.mkdir()
    command = [sys.executable, "-m", "forge_train", "run", str(job), "--nproc", "2"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", FOLDER: str(beats)}
    life = CommandLife(command, environ, log)
    deadline = time.monotonic() + 100
    while 1 not in life.ranks():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    fault = Fault(0, "term", "start", rank=1, entry=1, fraction=fraction, seed=0)
    assert Injector(beats, start_seconds=2.0).inject(life, fault, PROCESS_KINDS["term"]) is not None
    while life.poll() is None or life.living():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.01)
    assert life.poll() == 75, log.read_text()
    assert "Traceback" not in log.read_text()
    done = forge_train("run", job)
    assert done.code == 0, done.err


def test_F59_a_rank_that_waits_to_meet_others_leaves_when_its_launcher_is_killed(
    tmp_path: Path,
) -> None:
    """Found by the campaign (suite async, fault 61 of seed 0): the other one had no handler yet and died."""
    job, log = write_job(tmp_path), tmp_path / "log"
    environ = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "FORGE_NPROC": "2",
               "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # fmt: skip
    script = f"""
import ctypes, os, signal, socket, subprocess, sys
with socket.create_server(("127.0.0.1", 0)) as free:
    port = str(free.getsockname()[1])
with open({str(tmp_path / "port")!r}, "w") as file:
    file.write(port)
die_with_me = lambda: ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)
subprocess.Popen([sys.executable, "-m", "forge_train", "run", {str(job)!r}],
                 env={{**os.environ, "MASTER_PORT": port}}, preexec_fn=die_with_me).wait()
"""
    command = [sys.executable, "-c", script]
    life = CommandLife(command, {**os.environ, "OMP_NUM_THREADS": "1", **environ}, log)
    deadline = time.monotonic() + 100
    port = tmp_path / "port"
    while not port.exists() or not port.read_text() or not listens(int(port.read_text())):
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)
    os.kill(life.pid, signal.SIGKILL)
    while life.living() or life.poll() is None:
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)
    assert "Traceback" not in log.read_text()


def listens(port: int) -> bool:
    """Whether somebody on this machine accepts connections there: rank 0, which then waits for the others."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(row[3] == "0A" and int(row[1].split(":")[1], 16) == port for row in rows)
