"""A job that found its node broken goes on elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.slurm.cluster import Slurm

from forge_resilience.slurm import JobFacts, SlurmConfig, batch_script

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

_SCRIPT = """#!/bin/bash
#SBATCH --nodes=1 --requeue --open-mode=append --exclude=n4 --output={folder}/out
trap '' TERM
echo "$SLURMD_NODENAME"
[ "${{SLURM_RESTART_COUNT:-0}}" = 0 ] || exit 0
{python} - <<END
from forge_resilience import Journal
from forge_resilience.health import broken_nodes
from forge_resilience.slurm import exclude_nodes
Journal("{folder}/events.jsonl").record("health", nodes=["$SLURMD_NODENAME"], is_known=True)
exclude_nodes(broken_nodes("{folder}/events.jsonl"))
END
exit 71
"""


def test_a_broken_node_is_excluded_and_the_job_goes_on_without_it(
    slurm: Slurm, tmp_path: Path
) -> None:
    script = tmp_path / "job.sh"
    script.write_text(_SCRIPT.format(folder=tmp_path, python=sys.executable))
    job = slurm.sbatch(script)
    assert slurm.wait_for_end(job) == "COMPLETED"
    lines = (tmp_path / "out").read_text().splitlines()
    first, second = (line for line in lines if line in slurm.nodes())
    assert first != second
    assert slurm.job(job)["Restarts"] == "1"
    assert set(slurm.job(job)["ExcNodeList"].split(",")) == {"n4", first}


_RANK = """
import os, sys, time
from forge_resilience import Journal
node = os.environ["SLURMD_NODENAME"]
rank = os.environ["SLURM_PROCID"]
life = os.environ.get("SLURM_RESTART_COUNT", "0")
print("life", life, node, flush=True)
if life == "0":
    if rank == "1":
        Journal("{run}/events.jsonl").record("health", nodes=[node], is_known=True)
        time.sleep(60)  # ended by srun, as the other rank leaves with a code
    while not os.path.exists("{run}/events.jsonl"):
        time.sleep(0.05)
    sys.exit(71)
"""


def test_a_batch_script_goes_on_without_the_node_that_its_ranks_found_broken(
    slurm: Slurm, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    (run / "slurm").mkdir(parents=True)
    (tmp_path / "rank.py").write_text(_RANK.format(run=run))
    script = run / "slurm/job.sh"
    broken = (sys.executable, "-m", "forge_resilience.health")
    facts = JobFacts(str(run), str(script), str(tmp_path), 30, broken_nodes=broken)
    command = [sys.executable, str(tmp_path / "rank.py")]
    script.write_text(batch_script(SlurmConfig(nodes=2, tasks_per_node=1), command, facts))
    job = slurm.sbatch(script)
    assert slurm.wait_for_end(job) == "COMPLETED", (run / f"slurm/job-{job}.out").read_text()
    log = (run / f"slurm/job-{job}.out").read_text()
    (excluded,) = slurm.job(job)["ExcNodeList"].split(",")
    assert f"{excluded} is broken" in log
    lives = [line.split()[1:] for line in log.splitlines() if line.startswith("life ")]
    assert ["0", excluded] in lives
    assert sorted(life for life, node in lives if node != excluded) == ["0", "1", "1"]
    assert ["1", excluded] not in lives
