"""A finished run that is continued with more steps: what becomes of its learning rate is printed before."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest

from forge_resilience import ExitCode
from forge_testing.runs import make_job
from forge_train import Trainer, load_job, read_run
from forge_train.report.summary import print_summary

pytestmark = pytest.mark.lane("test")

KEYS: dict[str, Any] = {"schedule.name": "cosine", "schedule.warmup_steps": 1, "schedule.min_lr_ratio": 0.1,
                        "eval.every_steps": 0, "sample.max_new_tokens": 0, "metrics.console": "plain"}  # fmt: skip


def cosine(step: int, total: int) -> float:
    done = (step - 1) / (total - 1)
    return 1e-2 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))


def test_F158_a_longer_run_reports_its_learning_rate(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = make_job(tmp_path)
    trainer = Trainer(load_job(job, {**KEYS, "train.steps": 4}))
    result = trainer.fit()
    print_summary(trainer, result, ["job.toml"])
    out = capfd.readouterr().out
    assert "run-2" in out

    # another run of an import begins with its weights, which are no key of the configuration
    trainer.paths.imported.touch()
    step_0 = trainer.paths.checkpoints / "step-00000000"
    for there in (False, True):
        if there:
            step_0.mkdir()
        print_summary(trainer, result, ["job.toml"])
        begin = f"--init.from {tmp_path / 'run'}@0"
        assert (begin in capfd.readouterr().out) is there
    # a stopped run names the command that goes on: of a batch script, whose file it is given, the script
    stopped = dataclasses.replace(result, exit_code=ExitCode.REQUEUE)
    for config, again in (
        ("job.toml", "run job.toml"),
        (tmp_path / "run/slurm/job.toml", f"sbatch {tmp_path}/run/slurm/job.sh"),
    ):
        print_summary(trainer, stopped, [str(config)])
        assert again in capfd.readouterr().out
    step_0.rmdir()
    trainer.paths.imported.unlink()
    rates = [cosine(4, 4), cosine(5, 8)]
    assert rates[1] > 4 * rates[0]
    (hint,) = (line for line in out.splitlines() if "--train.steps 8" in line)
    assert numbers(hint.partition("#")[2]) == pytest.approx(rates, rel=1e-3)
    Trainer(load_job(job, {**KEYS, "train.steps": 4})).fit()
    assert "learning rate" not in capfd.readouterr().out  # nothing has changed
    Trainer(load_job(job, {**KEYS, "train.steps": 8, "train.max_grad_norm": 0.5})).fit()
    lines = capfd.readouterr().out.splitlines()
    (changed,) = (line for line in lines if "train.max_grad_norm" in line)  # F210
    assert numbers(changed) == [1.0, 0.5]
    (line,) = (line for line in lines if "learning rate" in line)
    assert numbers(line) == pytest.approx([rates[0], 4, rates[1], 5], rel=1e-3)
    assert "train.steps" in line
    assert read_run(tmp_path / "run").metrics["lr"][3:5] == pytest.approx(rates, rel=1e-6)


def numbers(line: str) -> list[float]:
    return [float(found) for found in re.findall(r"(?<![\w.])\d[\d.]*(?:e-?\d+)?", line)]
