"""benchmarks/cluster_sweep.py on a real Slurm: two tiny layouts, submitted, measured, and not submitted again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.slurm.cluster import wait_until

ROOT = Path(__file__).parents[2]
SWEEP = """
[flags]
"train.steps" = 8
"eval.every_steps" = 1_000_000
"schedule.warmup_steps" = 5
"metrics.every_steps" = 1
"checkpoint.every_steps" = 0
"slurm.tasks_per_node" = 1
"slurm.cpus_per_task" = 1
"resilience.save_limit_seconds" = 20
[[sizes]]
name = "tiny"
config = "apps/train/configs/debug.toml"
[[layouts]]
name = "single"
flags = {}
[[layouts]]
name = "fsdp 2"
flags = {"parallel.dp_shard" = 2, "slurm.nodes" = 2}
[[published]]
name = "tiny/elsewhere"
gpus = 1
tokens_per_second = 1234
source = "a paper"
"""


@pytest.mark.slow
@pytest.mark.distributed
def test_cells_are_submitted_once_and_tabulated(slurm: Any, tmp_path: Path) -> None:
    (tmp_path / "sweep.toml").write_text(SWEEP)

    def run(verb: str, *more: str) -> str:
        given = ["--sweep", str(tmp_path / "sweep.toml"), "--runs", str(tmp_path / "runs"), *more]
        command = [sys.executable, "-m", "benchmarks.cluster_sweep", verb, *given]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        environ = {**os.environ, **slurm.environ, "PYTHONPATH": path}
        done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("table").count("not yet") == 2
    run("submit")
    wait_until(lambda: not slurm.run("squeue", "--noheader"), 240, every=0.5)
    lines = run("table").splitlines()[2:]
    assert [line.split(" | ")[:2] for line in lines] == [["| tiny/single", "1"], ["| tiny/fsdp 2", "2"], ["| tiny/elsewhere", "1"]]  # fmt: skip
    assert all(float(line.split(" | ")[2].replace(",", "")) > 0 for line in lines)
    run("submit")
    assert not slurm.run("squeue", "--noheader")
