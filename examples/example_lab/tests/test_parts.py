"""Parts by themselves, by the names that Forge finds them under, and in a run. Needs the distribution installed."""

from pathlib import Path

import pytest
from example_lab.schedule import halving

from forge_train import ConfigError, Trainer, load_job, read_run
from forge_train.cli import run_verb

JOB = Path(__file__).parent.parent / "job.toml"


def test_the_rate_halves_and_stays_above_the_floor():
    rate = halving(None, 8, every=2, floor=0.2)
    assert [rate(step) for step in range(1, 9)] == [1, 1, 0.5, 0.5, 0.25, 0.25, 0.2, 0.2]


def test_a_run_uses_the_parts_by_name(tmp_path, capsys):
    run = tmp_path / "run"
    Trainer(load_job(JOB, {"run.dir": str(run), "metrics.every_steps": 1})).fit()
    metrics = read_run(run).metrics
    assert metrics["loss"][-1] < metrics["loss"][0]
    assert metrics["lr"][19:21] == [1e-2, 5e-3]  # of the schedule
    assert len((run / "losses.txt").read_text().split()) == 40  # of the callback
    assert (run / "columns.csv").read_text().startswith("step,loss,lr")  # of the sink

    capsys.readouterr()
    assert run_verb(["best", str(run)]) == 0
    best = min(metrics["loss"])
    step = metrics["step"][metrics["loss"].index(best)]
    assert capsys.readouterr().out == f"loss {best:.4f} at step {step}\n"


def test_an_option_that_a_part_does_not_have_is_rejected():
    with pytest.raises(ConfigError) as error:
        load_job(JOB, {"schedule.options.evry": 3})
    assert {problem.key for problem in error.value.problems} == {"schedule.options.evry"}
