"""A job that found its node broken goes on elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.slurm.cluster import Slurm

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

_SCRIPT = """#!/bin/bash
#SBATCH --nodes=1 --requeue --open-mode=append --exclude=n4 --output={folder}/out
trap '' TERM
echo "$SLURMD_NODENAME"
[ "${{SLURM_RESTART_COUNT:-0}}" = 0 ] || exit 0
{python} - <<END
from forge_resilience import Journal
from forge_resilience.health.exclude import broken_nodes, exclude_nodes
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
