"""Local workers as real processes: exit codes, signals, deaths, and nobody left behind."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forge_resilience import local_workers, run_local_workers
from forge_resilience.slurm.client import Queue
from forge_testing.problems import rejects
from forge_testing.processes import orphan_code

pytestmark = pytest.mark.distributed

# A worker without torch: it writes its pid, then does what RANK says.
_HEAD = """
import os, signal, sys, time
from pathlib import Path
rank, here = int(os.environ["RANK"]), Path(sys.argv[1])
def ready(name):
    (here / f"{name}{rank}.tmp").write_text(str(os.getpid()))
    (here / f"{name}{rank}.tmp").rename(here / f"{name}{rank}")
def wait_for(name):
    while not (here / name).exists():
        time.sleep(0.005)
def on(number, code):
    signal.signal(number, lambda n, f: (ready("signal"), sys.exit(code)))
"""
_LAUNCHER = """
import sys
from forge_resilience import run_local_workers
more = eval(f"dict({sys.argv[2]})")
sys.exit(run_local_workers([sys.executable, "-c", *sys.argv[3:]], int(sys.argv[1]), **more))
"""


def worker(body: str, folder: Path) -> list[str]:
    return [sys.executable, "-c", _HEAD + body, str(folder)]


def launcher(body: str, nproc: int, folder: Path, more: str = "") -> subprocess.Popen[str]:
    """The launcher as a process of its own, to be hurt."""
    return subprocess.Popen(
        [sys.executable, "-c", _LAUNCHER, str(nproc), more, _HEAD + body, str(folder)],
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(path: Path) -> int:
    """The pid in `path`, once it is there."""
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.005)
    return int(path.read_text())


def said_of_ranks(errors: str) -> list[str]:
    """The launcher's own lines; torch has one of its own where numpy is absent."""
    return [line for line in errors.splitlines() if line.startswith(("rank", "Traceback"))]


def gone(pid: int) -> bool:
    """True once the process has ended (a zombie counts: its parent is what the test killed).

    One that stays is killed, so that a failing test leaves nothing behind either.
    """
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    return False


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("sys.exit(0)", 0, []),
        ("sys.exit(75 if rank == 1 else 0)", 75, []),
        ("sys.exit(75)", 75, []),
        ("sys.exit(66 if rank == 1 else 0)", 66, ["rank 1 (pid", "code 66"]),
        (  # the neighbour that lost its connection ends first; the job's code is the cause's
            "ready('end')\nif rank == 0: sys.exit(1)\n"
            "on(signal.SIGTERM, 65); ready('handler'); wait_for('never')",
            65,
            ["rank 0 (pid", "code 1;", "code 65,"],
        ),
        (  # a death by a signal is code 1, and what the others say when they are stopped is no excuse
            "on(signal.SIGTERM, 75); ready('handler')\n"
            "if rank == 2: wait_for('handler0'); wait_for('handler1'); os.kill(os.getpid(), 9)\n"
            "wait_for('never')",
            1,
            ["rank 2 (pid", "SIGKILL", "other 2"],
        ),
    ],
)
def test_the_exit_code_of_the_job(tmp_path, capfd, body, code, said):
    if code == 65:  # rank 0 ends when the others can be told
        body = body.replace(
            "if rank == 0:", "if rank == 0: wait_for('handler1'); wait_for('handler2');"
        )
    assert run_local_workers(worker(body, tmp_path), 3) == code
    err = capfd.readouterr().err
    assert all(words in err for words in said), err
    assert said or said_of_ranks(err) == []  # nothing is announced when all is well


@pytest.mark.lane("test")
def test_a_worker_that_ignores_TERM_is_killed_in_time(tmp_path, capfd):
    body = (
        "if rank == 1: wait_for('deaf0'); sys.exit(3)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); ready('deaf'); wait_for('never')"
    )
    began = time.monotonic()
    assert run_local_workers(worker(body, tmp_path), 2, grace_seconds=0.3) == 3
    assert time.monotonic() - began < 10
    assert "rank 0 (pid" in (err := capfd.readouterr().err)
    assert "0.3 s of SIGTERM" in err
    assert gone(wait_for(tmp_path / "deaf0"))


def test_the_environment_of_a_worker(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    names = [
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "OMP_NUM_THREADS",
    ]
    body = (
        f"(here / os.environ['RANK']).write_text(' '.join(os.environ[n] for n in {names}))\n"
        "assert 'TORCHELASTIC_RUN_ID' not in os.environ\n"
        "(here / f'port{rank}').write_text(os.environ['MASTER_PORT'])\n"
        "(here / f'name{rank}').write_text(os.environ['FORGE_RUN_NAME'])"
    )
    environ = {**os.environ, "TORCHELASTIC_RUN_ID": "outer"}
    assert run_local_workers(worker(body, tmp_path), 2, environ) == 0
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    for rank in range(2):
        assert (tmp_path / str(rank)).read_text() == f"{rank} {rank} 2 2 127.0.0.1 {threads}"
    assert (tmp_path / "port0").read_text() == (tmp_path / "port1").read_text()
    name = (tmp_path / "name0").read_text()
    assert name == (tmp_path / "name1").read_text()

    assert run_local_workers(worker(body, tmp_path), 1, {**environ, "OMP_NUM_THREADS": "7"}) == 0
    assert (tmp_path / "0").read_text().endswith(" 7")
    assert (tmp_path / "name0").read_text() != name


def test_the_port_is_held_until_rank_0_has_it(tmp_path):
    """No moment at which another process could take the port (F64 picks one and lets go of it)."""
    body = """
import socket
if rank == 1: wait_for("checked0"); sys.exit(0)
held = socket.socket(fileno=int(os.environ["FORGE_STORE_FD"]))
assert held.getsockname() == ("127.0.0.1", int(os.environ["MASTER_PORT"]))
try:
    socket.create_server(held.getsockname())
except OSError:
    ready("checked")
else:
    sys.exit(9)
assert "FORGE_STORE_FD" in os.environ
"""
    assert run_local_workers(worker(body, tmp_path), 2) == 0


@pytest.mark.lane("test")
def test_invalid_arguments_are_rejected(tmp_path):
    with rejects("nproc", 0, "range"):
        run_local_workers(["true"], 0)
    with pytest.raises(FileNotFoundError, match=str(tmp_path / "nothing")):
        run_local_workers([str(tmp_path / "nothing")], 2)
    before = signal.getsignal(signal.SIGTERM)
    assert run_local_workers(["true"], 1) == 0
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.lane("test")
def test_F63_a_signal_to_the_launcher_reaches_every_worker_and_leaves_no_orphan(tmp_path):
    """torchrun dies of USR1 and leaves its workers."""
    body = """
for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, lambda n, f: ready(signal.Signals(n).name))
on(signal.SIGTERM, 75); ready("pid"); wait_for("never")
"""
    process = launcher(body, 3, tmp_path)
    pids = [wait_for(tmp_path / f"pid{rank}") for rank in range(3)]
    for name in ("SIGUSR1", "SIGINT", "SIGHUP"):
        process.send_signal(getattr(signal, name))
        assert [wait_for(tmp_path / f"{name}{rank}") for rank in range(3)] == pids
    process.terminate()
    assert (process.wait(timeout=30), said_of_ranks(process.stderr.read())) == (75, [])
    assert all([gone(pid) for pid in pids])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals a parent's death")
def test_a_signal_before_the_workers_can_handle_it_is_still_a_stop(tmp_path):
    """A job that is preempted while its ranks import must come again: 75, whoever was too young."""
    body = """
if rank == 0:
    on(signal.SIGTERM, 75)
ready("up")
while True:
    time.sleep(0.01)
"""
    job = launcher(body, 3, tmp_path)
    for rank in range(3):
        wait_for(tmp_path / f"up{rank}")
    job.send_signal(signal.SIGTERM)
    _, errors = job.communicate(timeout=30)
    assert job.returncode == 75, errors
    assert "died" not in errors


def test_F59_a_rank_that_waits_for_one_that_a_stop_killed_is_ended_in_time(tmp_path):
    """The stop came while the ranks imported: one died of it, another has a handler already and waits to meet it."""
    body = """
if rank == 0:
    signal.signal(signal.SIGUSR1, lambda *_: ready("flag"))
ready("up")
while True:
    time.sleep(0.01)
"""
    job = launcher(body, 2, tmp_path, "grace_seconds=0.5")
    for rank in range(2):
        wait_for(tmp_path / f"up{rank}")
    job.send_signal(signal.SIGUSR1)
    _, errors = job.communicate(timeout=30)
    assert job.returncode == 75, errors
    assert "rank 0" in errors
    assert "0.5 s of SIGUSR1" in errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_F185_a_stop_signal_that_kills_a_rank_before_the_launcher_sees_it(tmp_path, capfd, number):
    """As one to the whole process group may; here the launcher gets it after the death."""
    body = (
        f"signal.signal({int(number)}, signal.SIG_DFL)\nready('up'); wait_for(f'up{{1 - rank}}')\n"
        "if rank == 1: wait_for('late0')\n"
        f"if rank == 0 and os.fork() == 0: time.sleep(0.1); os.kill({os.getpid()}, {int(number)}); os._exit(0)\n"
        f"ready('late'); os.kill(os.getpid(), {int(number)})"
    )
    assert run_local_workers(worker(body, tmp_path), 2) == 75
    assert said_of_ranks(capfd.readouterr().err) == []


def test_F185_a_rank_that_ends_by_a_stop_signal_of_its_own_has_crashed(tmp_path):
    found = local_workers.run_workers(worker("os.kill(os.getpid(), 15)", tmp_path), [{"RANK": "3"}])
    assert (found.code, found.rank, found.requested) == (1, 3, False)


@pytest.mark.parametrize("value", [math.inf, -1.0])
def test_F194_a_grace_after_which_no_kill_would_come(value):
    with rejects("grace_seconds", value, "range"):
        run_local_workers(["true"], 1, grace_seconds=value)


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
def test_F164_what_a_dead_process_below_a_supervisor_started_ends(tmp_path, monkeypatch):
    """A worker, and a command of the orchestrator, which might submit a job that nobody follows."""
    monkeypatch.setattr("shutil.which", lambda name, path: name)
    assert orphan_code(monkeypatch, lambda: run_local_workers(["true"], 1)) == 1
    assert orphan_code(monkeypatch, lambda: Queue().submit(tmp_path, 1, "run", ())) == 1


@pytest.mark.slow
def test_a_killed_launcher_leaves_no_orphan(tmp_path):
    process = launcher("on(signal.SIGTERM, 75); ready('pid'); wait_for('never')", 2, tmp_path)
    pids = [wait_for(tmp_path / f"pid{rank}") for rank in range(2)]
    process.kill()
    process.wait()
    assert all([gone(pid) for pid in pids])
    assert all((tmp_path / f"signal{rank}").exists() for rank in range(2))  # TERM: it could save
