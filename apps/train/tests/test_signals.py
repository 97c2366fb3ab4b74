"""Stop signals: while Python imports, under tee and bash, as the terminal goes, and while a run leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from forge_ckpt import Store
from forge_testing import forge_train, wait_for_step, write_job
from forge_train import Callback, Trainer, load_job, read_run

pytestmark = pytest.mark.lane("test")

ENDLESS = ("--train.steps", "100000", "--checkpoint.every_steps", "0")

_RUN = """
import os, signal, sys
from forge_train.cli import main

class Signal:  # sends itself one when `name` is looked up: an import is the worst of moments
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), int(sys.argv[2]))

sys.meta_path.insert(0, Signal())
main(["run", sys.argv[3]])
"""


@pytest.mark.parametrize(
    ("module", "number"),
    [
        ("numpy", signal.SIGTERM),  # an exception there left torch waiting for a lock of its own
        pytest.param(
            "numpy._core", signal.SIGUSR1, marks=[pytest.mark.slow, pytest.mark.lane("ci")]
        ),  # C code drops an exception there
        pytest.param(
            "numpy._core", signal.SIGINT, marks=[pytest.mark.slow, pytest.mark.lane("ci")]
        ),
        pytest.param(
            "forge_train.loop.trainer",
            signal.SIGTERM,
            marks=[pytest.mark.slow, pytest.mark.lane("ci")],
        ),
    ],
)
def test_F99_a_signal_during_imports_ends_one_process_at_once(
    tmp_path: Path, module: str, number: int
) -> None:
    job = tmp_path / "job.toml"
    job.write_text(
        f'[run]\ndir = "{tmp_path}/run"\n[train]\nsteps = 1\n'
        '[parallel]\ndevice = "cpu"\n[data.sources.text]\nname = "builtin"\n'
    )
    command = [sys.executable, "-c", _RUN, module, str(int(number)), str(job)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 75, done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def shell(script: str, job: Path, **environ: str) -> subprocess.Popen[str]:
    """bash in a group of its own; `$RUN` in the script is the command."""
    run = f"{sys.executable} -m forge_train run {job}"
    return subprocess.Popen(
        ["bash", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "RUN": run, **environ},
    )


def assert_stopped_and_resumes(job: Path, name: str) -> None:
    """Saved once at the stop, by an event that names the signal, and the same command goes on from there."""
    events = read_run(job.parent / "run").events
    assert [e["event"] for e in events[-2:]] == ["save", "stop"]
    stop = events[-1]
    assert stop["signal"] == name
    assert [e["step"] for e in events if e["event"] == "save"][-1:] == [stop["step"]]
    again = forge_train("run", job, "--train.steps", str(stop["step"] + 2))
    assert again.code == 0, again.err
    resumed = [e for e in read_run(job.parent / "run").events if e["event"] == "resume"]
    assert (resumed[-1]["step"], resumed[-1]["steps_lost"]) == (stop["step"], 0)


@pytest.mark.slow
@pytest.mark.distributed
def test_F61_under_tee_a_signal_to_the_process_group_still_saves(tmp_path: Path) -> None:
    """Slurm signals all processes of a step: tee is gone first, and every line is an error from then on."""
    job, log = write_job(tmp_path), tmp_path / "log"
    script = f"$RUN {' '.join(ENDLESS)} 2>&1 | tee {log}; exit ${{PIPESTATUS[0]}}"
    process = shell(f"trap : TERM USR1; {script}", job)
    wait_for_step(process, tmp_path / "run/metrics.jsonl", 3)
    os.killpg(process.pid, signal.SIGTERM)
    process.communicate(timeout=100)
    assert process.returncode == 75
    assert_stopped_and_resumes(job, "SIGTERM")


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("script", ["$RUN {flags}", "$RUN {flags}; code=$?; exit $code"])
def test_under_bash_a_signal_to_the_group_saves(tmp_path: Path, script: str) -> None:
    """`bash -c` becomes a single command; in front of a list it needs a trap to live on."""
    job = write_job(tmp_path)
    process = shell("trap : USR1; " + script.format(flags=" ".join(ENDLESS)), job)
    wait_for_step(process, tmp_path / "run/metrics.jsonl", 3)
    os.killpg(process.pid, signal.SIGUSR1)
    _, code = process.communicate(timeout=100), process.returncode
    assert code == 75
    assert_stopped_and_resumes(job, "SIGUSR1")


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


@pytest.mark.slow
@pytest.mark.distributed
def test_an_interrupt_while_a_run_leaves_prints_no_traceback() -> None:
    """Found by the campaign (suite wait, fault 38 of seed 0): a storm outlived the save and met atexit."""
    script = """
import atexit, os, signal, sys
from forge_train import process
signal.signal(signal.SIGINT, signal.default_int_handler)  # as while a sample is written
atexit.register(os.kill, os.getpid(), signal.SIGINT)
process.end(75, True, True)
"""
    for world in ("1", "2"):
        environ = {**os.environ, "WORLD_SIZE": world, "RANK": "0"}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environ, capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (75, "")


@pytest.mark.slow
@pytest.mark.distributed
def test_an_interrupt_between_the_sample_and_the_end_prints_no_traceback() -> None:
    """Found by the campaign (suite wait, fault 82 of seed 0): it came while its handler was replaced."""
    script = """
import os, signal
from forge_resilience.stop import interruptible
from forge_train import process
real = signal.signal
def late(number, handler):
    if number == signal.SIGINT:
        os.kill(os.getpid(), number)
        for _ in range(1000):  # here the handler of before runs
            pass
    return real(number, handler)
with interruptible(75):
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(10**9):
        pass
print("left the block", flush=True)
signal.signal = late
process.end(75, True, True)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (75, "left the block\n", "")


def test_a_signal_after_an_error_does_not_end_the_save_that_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fails(Callback):
        def after_step(self, step: int) -> None:
            raise RuntimeError("a mistake")

    before, leave, handlers = signal.getsignal(signal.SIGTERM), Store.__exit__, []

    def exit_store(store: Store, *args: object) -> None:
        handlers.append(signal.getsignal(signal.SIGTERM))
        leave(store, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Store, "__exit__", exit_store)
    with pytest.raises(RuntimeError, match="a mistake"):
        Trainer(load_job(write_job(tmp_path)), callbacks=[Fails()]).fit()
    assert handlers
    assert before not in handlers
    assert signal.getsignal(signal.SIGTERM) == before
