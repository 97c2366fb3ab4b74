"""`explain --plot`: what is drawn is what the run does."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from forge_testing import write_job
from forge_testing.problems import rejects
from forge_train import Callback, ConfigError, Trainer, cli, load_job
from forge_train.report.planned import planned

pytestmark = pytest.mark.lane("test")

TABLES = """
[schedule]
name = "wsd"
warmup_steps = 3
[schedule.wsd]
decay_steps = 4
decay = "linear"
[optimizer.groups.head]
patterns = ["lm_head.*"]
lr_multiplier = 0.5
[optimizer.groups.front]
patterns = ["embedding.*"]
[train.stages.later]
start_step = 5
lr_multipliers = {head = 0.0, front = 2.0}
"""


class Rates(Callback):
    """The rate of each group and the tokens so far, after each step."""

    def on_start(self, trainer: Trainer) -> None:
        self.rates: dict[str, list[float]] = {}
        self.tokens: list[int] = []

    def on_step_end(self, trainer: Trainer) -> None:
        groups = {g.get("group", "others"): g["lr"] for g in trainer.optimizer.param_groups}
        for name, rate in groups.items():
            self.rates.setdefault(name, []).append(rate)
        self.tokens.append(trainer.progress.tokens)


@pytest.mark.lane("quick")
def test_what_is_drawn_is_what_the_run_does(tmp_path: Path) -> None:
    job = load_job(write_job(tmp_path, TABLES), {"train.steps": 12, "eval.every_steps": 0})
    seen = Rates()
    Trainer(job, [seen]).fit()
    plan = planned(job.config)
    assert plan.steps == list(range(1, 13))
    assert plan.rates == seen.rates
    assert [sum(plan.tokens[: i + 1]) for i in range(12)] == seen.tokens


def test_a_long_run_is_drawn_at_some_steps_and_every_edge(tmp_path: Path) -> None:
    settings = {"train.steps": 10**6 + 1, "train.stages.later.start_step": 700_003}
    job = load_job(write_job(tmp_path, TABLES), {**settings, "schedule.warmup_steps": 1234})
    plan = planned(job.config)
    assert len(plan.steps) < 3000
    assert {1, 1234, 700_002, 700_003, 10**6 - 3, 10**6 + 1} <= set(plan.steps)


def test_the_length_may_come_from_the_size_of_the_model(tmp_path: Path) -> None:
    job = load_job(write_job(tmp_path), {"train.tokens_per_parameter": 0.1})
    assert planned(job.config).steps[-1] == Trainer(job).total_steps


@pytest.mark.slow
def test_explain_writes_the_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    job = write_job(tmp_path, TABLES)
    for name, start in (("a.png", b"\x89PNG"), ("b.svg", b"<?xml")):
        assert cli.explain([str(job), "--plot", str(tmp_path / name)]) == 0
        assert str(tmp_path / name) in capsys.readouterr().out.splitlines()[-1]
        assert (tmp_path / name).read_bytes().startswith(start)
    words = set(re.findall(r">([^<>]+)</text>", (tmp_path / "b.svg").read_text()))
    assert {"head", "front", "others", "step", "learning rate"} <= words
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("file", "code"), [("picture.jpg", "name"), ("no_folder/a.png", "not_found")]
)
def test_a_plot_that_cannot_be_drawn_is_rejected(
    tmp_path: Path, file: str, code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with rejects("--plot", file, code, ConfigError):
        cli.explain([str(write_job(tmp_path)), "--plot", file])
    assert not capsys.readouterr().out


def test_without_matplotlib_the_error_names_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with rejects("--plot", ..., "requires", ConfigError, where="'forge-train[plot]'"):
        cli.explain([str(write_job(tmp_path)), "--plot", str(tmp_path / "a.png")])
