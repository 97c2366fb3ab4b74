"""Runs that hang or crash in four ways, one life after the other, and end with the bits of an undisturbed one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from forge_testing import start
from forge_testing.runs import fit_alone, fit_on_ranks, make_job
from forge_train import load_trained, read_run

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

# One fault a life, each at a later step than the one before.
_FAULTS = """
import ctypes, fcntl, os, signal, time
import torch.distributed as dist
from forge_train import Callback

def hold_the_gil():
    lock, again = open("lock", "w"), open("lock", "w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    ctypes.PyDLL(None).flock(again.fileno(), fcntl.LOCK_EX)  # no signal wakes it

def read_a_dead_disk():
    time.sleep(600)

class Faults(Callback):
    def on_step_end(self, trainer):
        life, step = int(os.environ["FORGE_LIFE"]), trainer.progress.step
        if dist.is_initialized() and dist.get_rank() == 0:
            if (life, step) == (1, 5):
                dist.barrier()  # which the other rank does not call
            return
        if (life, step) == (0, 4):
            os.kill(os.getpid(), signal.SIGSTOP)
        if (life, step) == (2, 7):
            hold_the_gil()
        if (life, step) == (3, 10):
            trainer.loader.next_or_filler = lambda *_: read_a_dead_disk()
        if (life, step) == (4, 11):
            os.abort()
"""
_KEYS = """
[callbacks.faults]
name = "my_faults:Faults"
[resilience.watch]
action = "restart"
step_seconds = 5
other_seconds = 60
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_faults.py").write_text(_FAULTS)
    return make_job(tmp_path, _KEYS)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    model, _, step = load_trained(folder / "run")
    assert step == 12
    return dict(model.state_dict())


def rows(folder: Path) -> list[tuple[int, float]]:
    metrics = read_run(folder / "run").metrics
    return list(zip(metrics["step"], metrics["loss"], strict=True))


def events(folder: Path, *names: str) -> list[dict]:
    return [e for e in read_run(folder / "run").events if e["event"] in names]


def test_F66_five_faults_are_named_and_the_run_ends_bit_by_bit(tmp_path: Path, job: Path) -> None:
    plain = make_job(tmp_path / "undisturbed")
    assert [rank.code for rank in fit_on_ranks(2, plain)] == [0, 0]

    process = start("run", job, "--nproc=2", cwd=tmp_path)
    out, said = process.communicate(timeout=400)
    assert process.returncode == 0, said

    hangs, restarts = events(tmp_path, "hang"), events(tmp_path, "restart")
    assert [(e["rank"], e["phase"], e["step"]) for e in hangs] == [
        (1, "step", 4), (0, "step", 5), (1, "step", 7), (1, "data", 11),
    ]  # fmt: skip
    assert all(5 < e["seconds"] <= 5 + 5 for e in hangs)  # the limit, and what was granted
    causes = [e["cause"] for e in hangs]
    assert "SIGSTOP" in causes[0]
    assert "waits in barrier" in causes[1]
    assert "in hold_the_gil" in causes[2]
    assert "in read_a_dead_disk" in causes[3]
    assert restarts[4]["cause"] == "rank 1 died by SIGABRT"
    assert [e["life"] for e in restarts] == [1, 2, 3, 4, 5]
    assert len(events(tmp_path, "start", "resume")) == 6

    wanted, got = weights(tmp_path / "undisturbed"), weights(tmp_path)
    assert all(torch.equal(got[name], value) for name, value in wanted.items())
    assert rows(tmp_path) == rows(tmp_path / "undisturbed")
    assert "Traceback" not in out + said
    assert len(re.findall(r"forge-train: rank \d: ", said)) <= 1  # of the survivor of the abort


def test_one_process_is_started_again_after_a_crash(tmp_path: Path, job: Path) -> None:
    """Without --nproc, too: the key starts a supervisor."""
    (tmp_path / "my_faults.py").write_text(
        _FAULTS.replace("(4, 11)", "(0, 7)").replace("(0, 4)", "()")
    )
    process = start("run", job, cwd=tmp_path)
    said = process.communicate(timeout=200)[1]
    assert process.returncode == 0, said
    (restart,) = events(tmp_path, "restart")
    assert (restart["cause"], restart["step"]) == ("rank 0 died by SIGABRT", 7)
    fit_alone(make_job(tmp_path / "undisturbed"), **{"metrics.console": "off"})
    wanted, got = weights(tmp_path / "undisturbed"), weights(tmp_path)
    assert all(torch.equal(got[name], value) for name, value in wanted.items())
