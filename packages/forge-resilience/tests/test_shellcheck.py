"""Batch scripts of every kind, read by shellcheck."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

import forge_resilience.slurm
from forge_resilience.slurm import JobFacts, SlurmConfig, batch_script, interactive_commands

_ALL: dict[str, Any] = {
    "nodes": "3-4", "gpus_per_node": 8, "cpus_per_task": 4, "prologue": ("ulimit -n 4096",), "retries": 3,
    "environment": {"A": "$HOME/b c"}, "container": ("env", "B=$HOME/`x`"), "srun_options": ("--cpu-bind=cores",),
}  # fmt: skip
_ELEMENTS: dict[str, Any] = {
    "array": "0-7",
    "array_run_dirs": True,
    "array_arguments": ("--run.seed=%a", "--x=it's %a"),
}


@pytest.mark.parametrize("on_stop", ["requeue", "resubmit", "leave"])
@pytest.mark.parametrize("options", [{}, _ALL, _ELEMENTS], ids=["plain", "all", "array"])
@pytest.mark.parametrize("checkpoints", [None, "checkpoints/step-*/manifest.json"])
def test_every_script_passes_shellcheck(
    tmp_path: Path, options: dict[str, Any], on_stop: Any, checkpoints: str | None
) -> None:
    facts = JobFacts(
        "/a run/of 'mine'", "/a run/of 'mine'/slurm/job.sh", "/work dir", checkpoints=checkpoints
    )
    config, command = (
        SlurmConfig(**options, on_stop=on_stop),
        ["python", "train me.py", "--x=$HOME"],
    )
    texts = [batch_script(config, command, facts)]
    if not config.array:
        texts.append(interactive_commands(config, command, facts)[1])
    for text in texts:
        (tmp_path / "job.sh").write_text(text)
        # SC2016: a value that is meant literally may hold a $
        done = subprocess.run(
            ["shellcheck", "--shell=bash", "--severity=style", "--exclude=SC2016", tmp_path / "job.sh"],
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout


def test_the_sections_of_the_batch_script_are_one_valid_script() -> None:
    path = Path(forge_resilience.slurm.__file__).with_name("batch.sh")
    done = subprocess.run(["shellcheck", "--severity=style", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
