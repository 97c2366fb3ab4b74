"""`forge-train slurm --orchestrate`: which sizes it takes, and what it refuses, without a Slurm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forge_testing import forge_train, write_job
from forge_testing.problems import rejects
from forge_train import ConfigError
from forge_train.cli import run_verb

pytestmark = pytest.mark.lane("test")

_EXTRA = "[slurm]\ntasks_per_node = 2\n"


@pytest.mark.parametrize(
    ("flags", "key", "value", "code"),
    [
        (["--orchestrate"], "--orchestrate", ..., "requires"),
        (["--sizes", "2"], "--sizes", ..., "requires"),
        (["--orchestrate", "--sizes", "2,2"], "--sizes", "2,2", "type"),
        (["--orchestrate", "--sizes", "2", "--interactive"], "--interactive", ..., "batch"),
        (["--orchestrate", "--sizes", "2", "--slurm.array", "0-1%1"], "slurm.array", ..., "batch"),
        (
            ["--orchestrate", "--sizes", "3,1", "--parallel.dp_shard", "4"],
            "parallel.dp_shard",
            4,
            "world_size",
        ),
    ],
)
def test_impossible_options_are_rejected_before_anything_is_written(
    tmp_path: Path, flags: list[str], key: str, value: Any, code: str
) -> None:
    with rejects(key, value, code, ConfigError) as caught:
        run_verb(["slurm", str(write_job(tmp_path, _EXTRA)), *flags])
    origins = [p.origin for p in caught.value.problems]
    assert origins == (["--sizes 3", "--sizes 1"] if code == "world_size" else [""])
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_sizes_that_are_not_legal_are_left_out_with_a_warning(tmp_path: Path) -> None:
    flags = ("--orchestrate", "--sizes", "3,2", "--parallel.dp_shard", "4", "--dry_run")
    shown = forge_train("slurm", write_job(tmp_path, _EXTRA), *flags)
    assert shown.code == 0
    assert "#SBATCH --nodes=2\n" in shown.out
    assert "#SBATCH --no-requeue\n" in shown.out
    assert "parallel.dp_shard 4 " in shown.err
    assert "[--sizes 3]" in shown.err
    assert not (tmp_path / "run").exists()
