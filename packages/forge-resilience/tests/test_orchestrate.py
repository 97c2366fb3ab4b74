"""What the orchestrator refuses, and how it reads Slurm's answers; on a real Slurm: tests/slurm/test_orchestrate.py."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forge_resilience.slurm import (
    JobFacts,
    OrchestratorConfig,
    SlurmConfig,
    batch_script,
    chain_name,
    orchestrate,
)
from forge_resilience.slurm.commands import JobRow, Queue, QueueDown, QueueRefusal
from forge_resilience.slurm.orchestrate import _Orchestrator, _State
from forge_testing.durability import synced_renames
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")


def test_every_broken_rule_is_named() -> None:
    wrong = {"wait_seconds": -1, "grow_after_seconds": -1}
    wrong |= {"max_resizes_per_hour": 61, "poll_seconds": 0}
    with rejects("wait_seconds", -1, "range") as caught:
        OrchestratorConfig(**wrong)
    assert {p.key: p.value for p in caught.value.problems} == wrong


@pytest.mark.parametrize("sizes", [[], [0], [2, 2]])
def test_sizes_that_cannot_be_are_refused(tmp_path: Path, sizes: list[int]) -> None:
    with rejects("sizes", sizes, "range"):
        orchestrate(tmp_path / "job.sh", sizes, "name")
    with rejects("script", str(tmp_path / "job.sh"), "not_found"):
        orchestrate(tmp_path / "job.sh", [1], "name")


def test_a_run_has_one_name_wherever_it_is_called_from(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "run")
    assert (
        chain_name(tmp_path / "run")
        == chain_name(tmp_path / "x/../run")
        == chain_name(tmp_path / "link")
    )
    assert chain_name(tmp_path / "run") != chain_name(tmp_path / "other" / "run")


def test_an_orchestrated_script_never_continues_itself() -> None:
    script = batch_script(
        SlurmConfig(on_stop="leave", max_restarts=3), ["train"], JobFacts("/r", "/r/job.sh", "/")
    )
    assert "#SBATCH --no-requeue" in script
    assert "scontrol requeue" not in script
    assert "  FORGE_CHAIN=$chain sbatch" not in script
    assert 'printf "%s %s\\n" "$job" "$?" >>/r/ends-"$chain"' in script
    assert "restarts >= 3" not in script


def _clients(folder: Path, **does: str) -> Queue:
    for name in ("sbatch", "squeue", "scancel", "scontrol", "sinfo"):
        (folder / name).write_text(f"#!/bin/sh\n{does.get(name, 'exit 1')}\n")
        (folder / name).chmod(0o755)
    return Queue(
        {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "5", "SLURM_CONF": "/etc/x"}
    )


def test_the_queue_is_read_with_codes_and_signals(tmp_path: Path) -> None:
    rows = "7|FAILED|3|19200|NonZeroExitCode|low|n[1-3]|\\n12|RUNNING|4|0|None|low|n[1-4]|\\n9|CANCELLED|3|9|None|low||\\n"
    queue = _clients(
        tmp_path,
        squeue=f"printf '{rows}'",
        sinfo="printf 'n1 idle\\nn2 idle*\\nn3 plnd\\nn4 mix\\n'",
    )
    assert queue.jobs("run") == [
        JobRow(7, "FAILED", 3, 75, "NonZeroExitCode", "low", "n[1-3]"),
        JobRow(9, "CANCELLED", 3, 137, "None", "low"),
        JobRow(12, "RUNNING", 4, 0, "None", "low", "n[1-4]"),
    ]
    assert [row.is_live for row in queue.jobs("run")] == [False, False, True]
    assert queue.idle("low") == 1
    assert "SLURM_JOB_ID" not in queue.environ, "sbatch would take options from it"


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_no_answer_is_not_a_refusal(tmp_path: Path) -> None:
    """Of a controller that is down nothing is known; one that is there may refuse a script, never a question."""
    queue = _clients(tmp_path)
    for ask in (lambda: queue.jobs("run"), lambda: queue.starts_in(tmp_path, 2)):
        with pytest.raises(QueueDown):
            ask()
    queue = _clients(tmp_path, scontrol="exit 0", sbatch="echo no such partition >&2; exit 1")
    with pytest.raises(QueueDown):
        queue.jobs("run")
    assert queue.starts_in(tmp_path, 2) is None
    with pytest.raises(QueueRefusal, match="sbatch: no such partition"):
        queue.submit(tmp_path, 2, "run", (), {})
    queue.cancel(7)  # it has ended meanwhile


def test_without_slurm_it_leaves_with_the_code_of_a_refusal(tmp_path: Path) -> None:
    (tmp_path / "job.sh").touch()
    done = subprocess.run(
        [sys.executable, "-m", "forge_resilience.slurm", tmp_path / "job.sh", "--sizes", "2,1", "--name", "run"],
        env={**os.environ, "PATH": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 78
    assert "sbatch, squeue, scancel, scontrol, sinfo" in done.stderr
    assert not list(tmp_path.glob("orchestrator-*"))


class _Nodes:
    """Stands for Slurm's commands: a job that runs on 2 nodes, and whether 2 more are free."""

    def __init__(self) -> None:
        self.free, self.told = False, 0

    def starts_in(self, *_: object) -> float | None:
        return 0.0 if self.free else None

    def tell(self, job: int) -> None:
        self.told = job


def test_F197_nodes_that_were_taken_meanwhile_have_not_been_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = OrchestratorConfig(grow_after_seconds=10)
    found = _Orchestrator(tmp_path / "job.sh", [4, 2], "run", config, 3, None)
    found.queue = nodes = _Nodes()
    found.state = _State(handled=0)
    row = JobRow(7, "RUNNING", 2, 0, "None", "low", "n[1-2]")
    told = []
    for now, nodes.free in ((0, True), (6, False), (12, True), (18, True), (23, True)):
        monkeypatch.setattr(time, "monotonic", lambda now=now: float(now))
        found._follow(row)
        told.append(nodes.told)
    assert told == [0, 0, 0, 0, 7]


def test_F191_a_job_that_did_not_leave_is_told_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = OrchestratorConfig(grow_after_seconds=10)
    found = _Orchestrator(tmp_path / "job.sh", [4, 2], "run", config, 3, None)
    found.queue = nodes = _Nodes()
    found.state, nodes.free = _State(handled=0), True
    told = []
    for now in (0, 10, 15, 20, 25, 26, 40):
        monkeypatch.setattr(time, "monotonic", lambda now=now: float(now))
        nodes.told = 0
        found._follow(JobRow(7, "RUNNING", 2, 0, "None", "low", "n[1-2]"))
        told.append(nodes.told)
    assert told == [0, 7, 0, 0, 7, 0, 0], "at most max_resizes_per_hour times"


def test_F197_the_state_is_on_the_disk_before_it_replaces_the_old_one(tmp_path: Path) -> None:
    found = _Orchestrator(tmp_path / "job.sh", [2], "run", OrchestratorConfig(), 3, None)
    found.state = _State(handled=0)
    with synced_renames() as moved:
        found._write(handled=5)
        found._write(handled=6)
    assert moved == [found.path.name] * 2
    assert found._read() == found.state
