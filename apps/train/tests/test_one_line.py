"""Who of many ranks says what went wrong: a job has one line for it, not one for each rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forge_train import cli

_HAND = {
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "LOCAL_WORLD_SIZE": "2",
}
_STEP = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
         "SLURM_JOB_ID": "7", "MASTER_ADDR": "10.0.0.1"}  # fmt: skip


def torchrun(rank: int) -> dict[str, str]:
    local = {"RANK": str(rank), "LOCAL_RANK": str(rank % 2)}
    return {**_HAND, **local, "TORCHELASTIC_RUN_ID": "none"}


def srun(rank: int) -> dict[str, str]:
    place = {"SLURM_NODEID": str(rank // 2), "SLURM_LOCALID": str(rank % 2)}
    return {**_STEP, **place, "SLURM_PROCID": str(rank)}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [torchrun, srun])
@pytest.mark.parametrize("flags", [["--train.steps", "-1"], ["--train.stepz", "1"]])
def test_F105_a_wrong_configuration_is_reported_once_per_host(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    launcher: Any,
    flags: list[str],
) -> None:
    """Before the ranks have met, nobody knows whether another host has the same file."""
    job = tmp_path / "job.toml"
    job.write_text('[run]\ndir = "run"\n[data.sources.text]\nname = "builtin"\n')
    said = []
    for rank in range(4):
        for name, value in launcher(rank).items():
            monkeypatch.setenv(name, value)
        assert cli._dispatch(["run", str(job), *flags]) == 78
        said.append(capsys.readouterr().err.replace("forge-train: ", ""))
    assert flags[0].removeprefix("--") in said[0]
    assert said[1] == said[3] == ""
    assert said[2].splitlines() == [f"rank 2: {line}" for line in said[0].splitlines()]
