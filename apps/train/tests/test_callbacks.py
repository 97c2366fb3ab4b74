"""Callbacks as tables: options, an interval, every hook of a run, and the list that 0.1 had."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forge_resilience.recorder import Recorder
from forge_testing import forge_train, write_job
from forge_testing.models import Counting
from forge_testing.problems import rejects
from forge_testing.runs import fit_on_ranks, make_job
from forge_train import (
    Callback,
    ConfigError,
    Extension,
    StateError,
    Trainer,
    cli,
    load_job,
    load_trained,
    read_run,
)
from forge_train.build.resolve import resolve
from forge_train.cli import run_verb
from forge_train.config.layers import read_layers
from forge_train.loop import opening
from forge_train.run.callback import load_callbacks

STEPS, COUNTING = "forge_testing.extensions:StepLog", "forge_testing.models:Counting"
TABLE = f"""
[callbacks.steps]
name = "{STEPS}"
every_steps = 3
options = {{file = "seen.txt"}}
[train.stages.late]
start_step = 4
lr_multipliers = {{head = 0.0}}
[optimizer.groups.head]
patterns = ["lm_head.*"]
"""
SHORT: dict[str, Any] = {
    "train.steps": 6,
    "checkpoint.wait": True,  # else the disk decides when a hook hears of a checkpoint
    "schedule.name": "constant",
    "eval.every_steps": 4,
    "checkpoint.every_steps": 2,
}


def words(folder: Path) -> list[str]:
    text = (folder / "run/seen.txt").read_text()
    return re.sub(r"\d+\.\d+", "LOSS", text).splitlines()


def test_hooks_are_called_in_every_stage_and_restart_of_a_run(tmp_path: Path) -> None:
    job = write_job(tmp_path, TABLE)
    Trainer(load_job(job, {**SHORT, "train.steps": 5})).fit()
    Trainer(load_job(job, {**SHORT, "train.steps": 9})).fit()
    saved = [f"checkpoint {s} step-{s:08d} True" for s in range(10)]
    assert words(tmp_path) == [
        *(saved[2], "step 3 1", "evaluation 4 validation LOSS", saved[4]),
        *("evaluation 5 validation LOSS", saved[5]),  # the first life's last
        *("step 6 2", saved[6], "evaluation 8 validation LOSS", saved[8], "step 9 3"),
        *("evaluation 9 validation LOSS", saved[9]),
    ]
    events = [e for e in read_run(tmp_path / "run").events if e["event"] == "evaluation"]
    said = [line.split() for line in (tmp_path / "run/seen.txt").read_text().splitlines()]
    results = [float(line[3]) for line in said if line[0] == "evaluation"]
    assert results == [e["val_loss"] for e in events]


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.distributed
def test_each_rank_has_its_callback_and_a_table_without_an_interval_that_of_its_class(
    tmp_path: Path,
) -> None:
    job = make_job(tmp_path, TABLE.replace("every_steps = 3\n", ""))
    for rank in fit_on_ranks(2, job, None, **{k.replace(".", "__"): v for k, v in SHORT.items()}):
        assert rank.problems == ()
    assert [line for line in words(tmp_path) if line.startswith("step")] == [
        "step 2 1",
        "step 4 2",
        "step 6 3",
    ]


def test_the_list_of_older_files_and_its_state_in_checkpoints_still_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[list[Callback]] = []

    def load(tables: Any) -> list[Callback]:
        loaded.append(load_callbacks(tables))
        return loaded[-1]

    monkeypatch.setattr(opening, "load_callbacks", load)
    job = write_job(tmp_path)
    older = job.read_text().replace("[train]", f'[train]\ncallbacks = ["{STEPS}", "{COUNTING}"]')
    job.write_text(older)
    Trainer(load_job(job, SHORT)).fit()
    assert [type(c).__name__ for c in loaded[0]] == ["StepLog", "Counting"]
    text = (tmp_path / "run/config.toml").read_text()
    tables = text[text.index("[callbacks.list_1]") :]
    older = text.replace(tables, "").replace(
        "[train]\n", f'[train]\ncallbacks = ["{STEPS}", "{COUNTING}"] # {job}\n'
    )
    (tmp_path / "run/config.toml").write_text(older)  # as 0.1 recorded it
    load_trained(tmp_path / "run")
    write_job(tmp_path, f'[callbacks.a]\nname = "{STEPS}"\n[callbacks.b]\nname = "{COUNTING}"\n')
    Trainer(load_job(job, {**SHORT, "train.steps": 8})).fit()
    steps, counting = loaded[-1]
    assert steps.seen == 4  # type: ignore[attr-defined]
    assert isinstance(counting, Counting)
    assert counting.calls["step_end"] == 8


def test_an_empty_list_of_older_files_is_no_change(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    Trainer(load_job(job, SHORT)).fit()
    record = tmp_path / "run/config.toml"
    older = record.read_text().replace("[callbacks]\n", "")
    record.write_text(older.replace("[train]\n", "[train]\ncallbacks = [] # default\n"))
    Trainer(load_job(job, {**SHORT, "train.steps": 7})).fit()
    (resumed,) = [e for e in read_run(tmp_path / "run").events if e["event"] == "resume"]
    assert resumed["changed"] == {"train.steps": [6, 7]}


@pytest.mark.parametrize(
    ("before", "after", "key", "value", "code"),
    [
        (STEPS, "steps", "callbacks.steps.name", "steps", "unknown"),
        (STEPS, "no_lab:Mine", "callbacks.steps.name", "no_lab:Mine", "import"),
        ("file =", "fil =", "callbacks.steps.options.fil", "seen.txt", "unknown_key"),
        ('"seen.txt"', "3", "callbacks.steps.options.file", 3, "type"),
        ("every_steps = 3", "every_steps = 0", "callbacks.steps.every_steps", 0, "range"),
        ("every_steps", "every_step", "callbacks.steps.every_step", ..., "unknown_key"),
        ("callbacks.steps", 'callbacks."a b"', "callbacks", "a b", "name"),
    ],
)
@pytest.mark.parametrize("verb", ["explain", "run"])
def test_a_wrong_table_is_rejected_before_a_run_exists(
    tmp_path: Path, verb: str, before: str, after: str, key: str, value: Any, code: str
) -> None:
    job = write_job(tmp_path, TABLE.replace(before, after))
    with rejects(key, value, code, ConfigError):
        run_verb([verb, str(job)])
    assert not (tmp_path / "run").exists()


class Older(Callback):
    def on_evaluation(self, trainer: Trainer, val_loss: float) -> None:  # type: ignore[override]
        """As of 0.1."""


class NoCallback:
    pass


class Misspelled(Callback):
    def on_lgo(self, trainer, row): ...
    def on_stepend(self, trainer): ...
    def finished(self):
        """A word of its own."""


class Inherits(Misspelled):
    """The methods of a class of its user."""


class Extended(Extension):
    def number(self, step): ...


@pytest.mark.lane("test")
def test_hooks_that_do_not_take_what_they_get_and_other_objects_are_rejected(
    tmp_path: Path,
) -> None:
    job = write_job(tmp_path)
    arguments = "on_evaluation(trainer, name, result)"
    with rejects("Older.on_evaluation", ..., "signature", ConfigError, where=arguments):
        Trainer(load_job(job), [Older()])
    with rejects("Inherits.on_lgo", ..., "misspelled", ConfigError) as caught:
        Trainer(load_job(job), [Inherits(), Extended()])
    assert {p.key for p in caught.value.problems} == {
        "Inherits.on_lgo",
        "Inherits.on_stepend",
        "Extended.number",
    }
    name = f"{__name__}:NoCallback"
    with rejects("callbacks.mine.name", name, "type", ConfigError):
        Trainer(load_job(job, {"callbacks.mine.name": name}))


@pytest.mark.slow
def test_a_flag_reaches_a_table(tmp_path: Path) -> None:
    told = forge_train("explain", write_job(tmp_path, TABLE), "--callbacks.steps.every_steps", "5")
    assert re.search(r"callbacks.steps.every_steps\s+5\s+flag", told.out), told.out + told.err
    assert "callbacks.<name>.name" in forge_train("run", "--help", COLUMNS="200").out


def digest_of(trainer: Trainer) -> float:
    with torch.no_grad():
        return sum(float(p.double().abs().sum()) for p in trainer.model.parameters())


class Weights(Callback):
    """The weights behind each step, as a hook of the step and a hook of its row see them; seconds in a checkpoint."""

    def __init__(self) -> None:
        self.after: dict[int, float] = {}
        self.logged: dict[int, float] = {}
        self.seconds: list[float] = []

    def on_step_end(self, trainer: Trainer) -> None:
        self.after[trainer.progress.step] = digest_of(trainer)

    def on_log(self, trainer: Trainer, row: Mapping[str, Any]) -> None:
        self.logged[row["step"]] = digest_of(trainer)

    def on_checkpoint(self, trainer: Trainer, step: int, path: Path) -> None:
        self.seconds.append(trainer.progress.seconds)


def test_F181_a_hook_of_a_row_sees_the_weights_of_its_step(tmp_path: Path) -> None:
    seen = Weights()
    flags = {"train.steps": 4, "metrics.every_steps": 1, "checkpoint.every_steps": 0}
    Trainer(load_job(write_job(tmp_path), flags), [seen]).fit()
    assert seen.logged == seen.after
    assert len({*seen.after.values()}) == 4


def test_F181_a_checkpoint_between_two_rows_has_the_seconds_since_the_row(tmp_path: Path) -> None:
    seen = Weights()
    flags = {**SHORT, "train.steps": 8, "metrics.every_steps": 100, "eval.every_steps": 0}
    Trainer(load_job(write_job(tmp_path), flags), [seen]).fit()
    assert seen.seconds == sorted({*seen.seconds})
    assert seen.seconds[0] > 0
    row = read_run(tmp_path / "run").metrics
    rate = row["tokens"][-1] / row["seconds"][-1]  # else some were counted twice
    assert row["tokens_per_second"][-1] == pytest.approx(rate)


def test_F181_the_layers_of_a_job_are_not_changed(tmp_path: Path) -> None:
    layers = read_layers(write_job(tmp_path))
    before = copy.deepcopy(layers)
    resolve(layers)
    assert layers == before


def test_F181_meshes_are_made_only_by_fit(tmp_path: Path) -> None:
    trainer = Trainer(load_job(write_job(tmp_path)))
    with pytest.raises(RuntimeError):
        trainer.meshes  # noqa: B018
    trainer.prepare()
    assert trainer.meshes.world_size == 1


def test_F181_sinks_are_closed_after_an_error_of_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Recorder] = []
    close = Recorder.close
    monkeypatch.setattr(Recorder, "close", lambda self: (closed.append(self), close(self)))
    monkeypatch.setattr("forge_train.loop.start.packing_report", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Trainer(load_job(write_job(tmp_path))).fit()
    assert len(closed) == 1


def test_F181_an_error_of_a_mounted_verb_ends_with_its_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def verb(args: list[str]) -> int:
        raise StateError([f"{args[0]} is damaged"])

    entry = SimpleNamespace(load=lambda: verb)
    monkeypatch.setattr(cli, "_mounted", lambda: {"mine": entry})
    assert cli._dispatch(["mine", "runs/x"]) == StateError(["x"]).exit_code
