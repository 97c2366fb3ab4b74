"""What the test cluster itself promises: everything that the other tests of this folder do to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.slurm import watch
from tests.slurm.cluster import CPU_NODE, NODES, Slurm, wait_until

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture
def script(slurm: Slurm, tmp_path: Path) -> Path:
    """A job of two nodes that notes each of its starts and the signals that its shell gets."""
    path = tmp_path / "script.sh"
    path.write_text(f"""#!/bin/bash
#SBATCH --nodes=2 --requeue --open-mode=append --output={tmp_path}/out
trap 'echo USR1' USR1
trap 'echo TERM; exit 0' TERM
echo "start ${{SLURM_RESTART_COUNT:-0}}"
[ "${{SLURM_RESTART_COUNT:-0}}" = 0 ] || exit 0
srun sleep 600 & wait; wait
""")
    return path


def said(script: Path) -> list[str]:
    out = script.parent / "out"
    return out.read_text().split("\n")[:-1] if out.exists() else []


def test_a_job_of_the_higher_partition_requeues_one_of_the_lower(slurm, script):
    job = slurm.sbatch(script)
    wait_until(lambda: "start 0" in said(script))
    slurm.usr1(job)
    wait_until(lambda: "USR1" in said(script))
    high = slurm.preempt()
    slurm.wait_for(high, "RUNNING")
    assert slurm.job(job)["JobState"] in ("PENDING", "COMPLETED")
    slurm.cancel(high)
    assert slurm.wait_for_end(job) == "COMPLETED"


def test_a_controller_that_crashes_keeps_its_jobs(slurm, script):
    job = slurm.sbatch(script)
    slurm.wait_for(job, "RUNNING")
    for crash in (False, True):
        slurm.restart_controller(crash)
        assert slurm.job(job)["JobState"] == "RUNNING"
    slurm.requeue(job)
    assert slurm.wait_for_end(job) == "COMPLETED"
    assert slurm.job(job)["Restarts"] == "1"


def test_drained_nodes_take_no_job_and_one_may_lack_the_shared_folder(slurm, tmp_path):
    slurm.drain("n1", "n3", "n4")
    (tmp_path / "file").touch()
    with slurm.hidden("n2", tmp_path):
        assert (
            slurm.run("srun", "--time=1", "bash", "-c", f"ls {tmp_path}; echo $SLURMD_NODENAME")
            == "n2\n"
        )
    assert slurm.run("srun", "--time=1", "ls", tmp_path) == "file\n"
    slurm.resume("n1", "n3", "n4")
    assert slurm.idle() == sorted([*NODES, CPU_NODE])


def test_nothing_outlives_a_killed_session(tmp_path):
    """Neither daemons nor a batch script, its step and their tasks."""
    code = f"""
import pathlib, sys, time
from tests.slurm.cluster import running_cluster
with running_cluster(pathlib.Path({str(tmp_path)!r})) as slurm:
    job = slurm.sbatch("--output={tmp_path}/out", "--wrap=srun sh -c 'echo here; sleep 600'")
    time.sleep(600)
"""
    session = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2])
    try:
        wait_until((tmp_path / "out").exists)
        wait_until(lambda: "here" in (tmp_path / "out").read_text())
        assert len(watch.processes_of(tmp_path)) >= 12
    finally:
        os.kill(session.pid, signal.SIGKILL)
        session.wait()
    wait_until(lambda: not watch.processes_of(tmp_path))
