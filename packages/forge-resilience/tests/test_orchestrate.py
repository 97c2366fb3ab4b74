"""What the orchestrator refuses, and how it reads Slurm's answers; on a real Slurm: tests/slurm/test_orchestrate.py."""

from __future__ import annotations

import contextlib
import os
import resource
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
from forge_resilience.slurm.client import JobRow, Queue, QueueDown, QueueRefusal
from forge_resilience.slurm.orchestrate import _Orchestrator
from forge_resilience.slurm.state_files import OrchestratorState
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
def test_sizes_that_cannot_be_are_rejected(tmp_path: Path, sizes: list[int]) -> None:
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
    assert "trap 'write_end " in script
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
    assert queue.idle_nodes("low") == 1
    assert "SLURM_JOB_ID" not in queue.environ, "sbatch would take options from it"


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_no_answer_is_not_a_rejection(tmp_path: Path) -> None:
    """Of a controller that is down nothing is known; one that is there may refuse a script, never a question."""
    queue = _clients(tmp_path)
    for ask in (lambda: queue.jobs("run"), lambda: queue.seconds_to_start(tmp_path, 2)):
        with pytest.raises(QueueDown):
            ask()
    queue = _clients(tmp_path, scontrol="exit 0", sbatch="echo no such partition >&2; exit 1")
    with pytest.raises(QueueDown):
        queue.jobs("run")
    assert queue.seconds_to_start(tmp_path, 2) is None
    with pytest.raises(QueueRefusal, match="sbatch: no such partition"):
        queue.submit(tmp_path, 2, "run", ())
    queue.cancel(7)  # it has ended meanwhile


def test_without_slurm_it_ends_with_the_code_of_a_rejected_job(tmp_path: Path) -> None:
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

    def __init__(self, *rows: JobRow) -> None:
        self.free, self.told, self.rows, self.submitted = False, 0, list(rows), []

    def jobs(self, name: str) -> list[JobRow]:
        return self.rows

    def submit(self, script: Path, nodes: int, *_: object) -> int:
        self.submitted.append(nodes)
        return 8

    def idle_nodes(self, partition: str) -> int:
        return 0

    def seconds_to_start(self, *_: object) -> float | None:
        return 0.0 if self.free else None

    def signal_batch_shell(self, job: int) -> None:
        self.told = job


def _growing(folder: Path) -> tuple[_Orchestrator, _Nodes]:
    """An orchestrator that takes nodes which were free for 10 seconds, and the nodes."""
    nodes = _Nodes()
    config = OrchestratorConfig(grow_after_seconds=10)
    return _orchestrator(folder, config=config, nodes=nodes), nodes


def test_F197_nodes_that_were_taken_meanwhile_have_not_been_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, nodes = _growing(tmp_path)
    found.state = OrchestratorState(handled=0)
    row = JobRow(7, "RUNNING", 2, 0, "None", "low", "n[1-2]")
    told = []
    for now, nodes.free in ((0, True), (6, False), (12, True), (18, True), (23, True)):
        monkeypatch.setattr(time, "monotonic", lambda now=now: float(now))
        found._follow(row)
        told.append(nodes.told)
    assert told == [0, 0, 0, 0, 7]


def test_F191_a_job_that_did_not_leave_is_signaled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, nodes = _growing(tmp_path)
    found.state, nodes.free = OrchestratorState(handled=0), True
    told = []
    for now in (0, 10, 15, 20, 25, 26, 40):
        monkeypatch.setattr(time, "monotonic", lambda now=now: float(now))
        nodes.told = 0
        found._follow(JobRow(7, "RUNNING", 2, 0, "None", "low", "n[1-2]"))
        told.append(nodes.told)
    assert told == [0, 7, 0, 0, 7, 0, 0], "at most max_resizes_per_hour times"


def test_F197_the_state_is_on_the_disk_before_it_replaces_the_old_one(tmp_path: Path) -> None:
    found = _orchestrator(tmp_path)
    found.state = OrchestratorState(handled=0)
    with synced_renames() as moved:
        found._update(handled=5)
        found._update(handled=6)
    assert moved == [found.path.name] * 2
    assert found._read() == found.state


_RUNNING = JobRow(7, "RUNNING", 2, 0, "None", "low", "n[1-2]")
_DAMAGED = [b"", b"{", b"[]", b"\xff", b"[" * 10**5, b'{"restarts": 1}', b'{"handled": "x"}', b'{"handled": 1e999}',
            b'{"handled": 99999999999999999999}', b'{"handled": 5, "resizes": 3}']  # fmt: skip


def _orchestrator(
    folder: Path,
    *rows: JobRow,
    sizes: tuple[int, ...] = (4, 2),
    config: OrchestratorConfig | None = None,
    nodes: _Nodes | None = None,
) -> _Orchestrator:
    return _Orchestrator(
        script=folder / "job.sh",
        sizes=sizes,
        name="run",
        config=config or OrchestratorConfig(),
        max_restarts=3,
        journal=None,
        queue=nodes or _Nodes(*rows),
    )


@pytest.mark.parametrize("content", _DAMAGED, ids=range(len(_DAMAGED)))
def test_F193_a_state_file_that_holds_none_is_named_and_the_job_is_followed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    found = _orchestrator(tmp_path, _RUNNING)
    found.path.write_bytes(content)
    (tmp_path / "ends-run").write_text("5 65\n")
    assert found.look() is None
    assert str(found.path) in capsys.readouterr().err
    assert found._read() == found.state == OrchestratorState(handled=5)


def test_F178_a_state_of_another_version_is_read(tmp_path: Path) -> None:
    found = _orchestrator(tmp_path, _RUNNING)
    found.path.write_text('{"handled": 5, "restarts": 2, "excluded": ["n1"], "later": {"a": 1}}')
    assert found.look() is None
    assert found.state == OrchestratorState(handled=5, restarts=2, excluded=("n1",))


def test_F193_an_end_of_a_job_that_cannot_be_is_no_end(tmp_path: Path) -> None:
    found = _orchestrator(tmp_path)
    found.path.write_text('{"handled": 5}')
    absurd = b"99999999999999999999 0\n4294967295 0\n6 0000\n 6 0\n\xff\n6\n6 0 0\n"
    (tmp_path / "ends-run").write_bytes(absurd)
    assert found.look() is None
    assert found.queue.submitted == [2]
    (tmp_path / "ends-run").write_bytes(absurd + b"6 65\n")
    assert found.look() == 65


def test_F193_a_full_disk_is_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = _orchestrator(tmp_path, JobRow(7, "FAILED", 2, 75))
    found.path.write_text('{"handled": 5}')
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        assert [found.look(), found.look()] == [None, None]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert capsys.readouterr().err.count("\n") == 1
    assert found._read() == OrchestratorState(handled=5)
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stderr", full)
        assert found.look() is None
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()
    assert found._read() == OrchestratorState(handled=7, restarts=1)


def test_F193_sizes_that_do_not_fit_and_long_waits_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = _orchestrator(tmp_path, sizes=(9, 8))
    assert found.look() is None
    assert found.queue.submitted == [8]
    assert "9, 8" in capsys.readouterr().err
    for reason in ("Resources", "JobHeldUser"):
        found = _orchestrator(tmp_path, JobRow(7, "PENDING", 8, 0, reason, "low"), sizes=(9, 8))
        said = []
        for now in (0, 500, 700, 900):
            monkeypatch.setattr(time, "monotonic", lambda now=now: float(now))
            assert found.look() is None
            said.append(reason in capsys.readouterr().err)
        assert said == [False, False, True, False]
