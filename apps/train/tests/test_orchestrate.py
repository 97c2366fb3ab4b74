"""`forge-train slurm --orchestrate`: which sizes it takes, and what it refuses, without a Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_testing import forge_train, write_job

_EXTRA = "[slurm]\ntasks_per_node = 2\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--orchestrate"], "--orchestrate and --sizes belong together"),
        (["--orchestrate", "--sizes", "2,2"], "--sizes '2,2' must be different numbers of nodes"),
        (["--orchestrate", "--sizes", "2", "--interactive"], "leave out --interactive"),
        (["--orchestrate", "--sizes", "3,1", "--parallel.dp_shard", "4"], "--sizes 3: "),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    tmp_path: Path, flags: list[str], said: str
) -> None:
    refused = forge_train("slurm", write_job(tmp_path, _EXTRA), *flags)
    assert refused.code == 78
    assert said in refused.err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_sizes_that_are_not_legal_are_left_out_aloud(tmp_path: Path) -> None:
    flags = ("--orchestrate", "--sizes", "3,2", "--parallel.dp_shard", "4", "--print")
    shown = forge_train("slurm", write_job(tmp_path, _EXTRA), *flags)
    assert shown.code == 0
    assert "#SBATCH --nodes=2\n" in shown.out
    assert "#SBATCH --no-requeue\n" in shown.out
    assert "left out: --sizes 3: " in shown.err
    assert not (tmp_path / "run").exists()
