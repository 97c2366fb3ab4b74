"""Hooks of extensions: their order, their state, and what a wrong one is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forge_testing import run_on_ranks, write_job
from forge_testing.counts import HookCounts, allowed_by_hook
from forge_testing.problems import rejects
from forge_testing.runs import as_rank
from forge_train import Callback, ConfigError, Extension, Trainer, load_job, read_run

ORDER = Path(__file__).with_name("order_of_hooks.txt")
EVERYTHING = """
[model.moe]
num_experts = 4
width_multiplier = 0.5
[train.stages.late]
start_step = 2
lr_multipliers = {head = 0.0}
[optimizer.groups.head]
patterns = ["lm_head.*"]
[lora]
rank = 2
whole = ["lm_head.*"]
"""
KEYS: dict[str, Any] = {
    "train.steps": 3,
    "train.micro_batch": 2,
    "metrics.every_steps": 1,
    "metrics.gradients_every_steps": 2,
    "checkpoint.every_steps": 2,
    "checkpoint.wait": True,
    "eval.every_steps": 2,
    "resilience.replicas.every_steps": 1,
    "health.every_steps": 2,
    "profile.start_step": 2,
    "profile.num_steps": 1,
    "sample.max_new_tokens": 0,
}


class Mine(Extension):
    """Overrides all hooks."""

    name = "mine"


HOOKS = [name for name, value in vars(Extension).items() if callable(value) and name[0] != "_"]
for hook in HOOKS:
    base = getattr(Extension, hook)
    setattr(Mine, hook, lambda self, *args, base=base: base(self, *args))


class Yours(Callback):
    """A callback, which has hooks of its own."""


def recorded(trainer: Trainer) -> list[str]:
    """A line for each call from now on: hook, extension."""
    lines: list[str] = []

    def wrapped(function: Callable[..., Any], line: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            lines.append(line)
            return function(*args)

        return call

    for extension in trainer.run.extensions:
        for hook in HOOKS:
            line = f"{hook} {type(extension).__name__}"
            setattr(extension, hook, wrapped(getattr(extension, hook), line))
    return lines


def test_the_order_of_all_hooks_is_that_of_the_file(tmp_path: Path) -> None:
    """A change of the order is read in the difference of the file."""
    trainer = Trainer(load_job(write_job(tmp_path, EVERYTHING), KEYS), [Mine(), Yours()])
    lines = recorded(trainer)
    trainer.fit()
    assert "\n".join(lines) + "\n" == ORDER.read_text()


def test_a_plain_run_has_no_extension_but_the_probe(tmp_path: Path) -> None:
    trainer = Trainer(load_job(write_job(tmp_path)))
    assert [type(extension).__name__ for extension in trainer.run.extensions] == ["Health"]
    assert not trainer.run.extensions.of("after_backward")


class Counts(Extension):
    """Has a state, numbers and a column."""

    name = "counts"

    def __init__(self) -> None:
        self.steps = 0

    def start(self, run: Any) -> None:
        self.run = run

    def after_backward(self, step: int, batch: Any) -> None:
        self.steps += 1

    def numbers(self, step: int) -> Any:
        return self.run.progress_of_nobody if step < 0 else _tensor(self.steps)

    def columns(self, numbers: Any) -> dict[str, float]:
        return {"counts.steps": numbers[0]}

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def _tensor(number: int) -> Any:
    import torch

    return torch.tensor([float(number)])


def test_a_state_is_saved_and_one_that_a_checkpoint_lacks_begins(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    keys = {"metrics.every_steps": 1, "eval.every_steps": 0}
    Trainer(load_job(job, {**keys, "train.steps": 3})).fit()
    Trainer(load_job(job, {**keys, "train.steps": 5}), [Counts()]).fit()
    Trainer(load_job(job, {**keys, "train.steps": 7}), [Counts()]).fit()
    assert read_run(tmp_path / "run").metrics["counts.steps"] == [None] * 3 + [1, 2, 3, 4]


def test_a_run_shows_only_its_fields(tmp_path: Path) -> None:
    mine = Counts()
    Trainer(load_job(write_job(tmp_path), {"train.steps": 1}), [mine]).fit()
    assert mine.run.progress.step == 1
    with pytest.raises(AttributeError):
        mine.run.checkpoints  # noqa: B018


@pytest.mark.parametrize("name", ["", "counts"])
def test_a_state_without_a_name_of_its_own_is_rejected(tmp_path: Path, name: str) -> None:
    other = Counts()
    other.name = name
    with rejects("Counts.name", name, "duplicate", ConfigError):
        Trainer(load_job(write_job(tmp_path)), [Counts(), other])


def test_a_run_until_a_step_that_saves_and_evaluates_nothing(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    keys = {"metrics.every_steps": 1, "train.steps": 4}
    whole = Trainer(load_job(job, keys)).fit()
    private = load_job(job, {**keys, "run.dir": str(tmp_path / "private")})
    result = Trainer(private, until=2, saves=False, evaluates=False).fit()
    assert (whole.step, result.step, result.exit_code, result.val_loss) == (4, 2, 75, None)
    assert not list((tmp_path / "private/checkpoints").glob("step-*"))
    rows = [read_run(tmp_path / run).metrics["loss"] for run in ("run", "private")]
    assert rows[1] == rows[0][:2]
    with rejects("until", 5, "range", ConfigError):
        Trainer(private, until=5)


def count_hooks(job: Path, keys: dict[str, Any]) -> tuple[Any, Any]:
    """Collectives and waits of one rank, by hook and extension."""
    as_rank()
    trainer = Trainer(load_job(job, keys), [Mine(), Yours()])
    counts = HookCounts(trainer)
    trainer.fit()
    return counts.collectives, counts.waits


@pytest.mark.distributed
def test_hooks_communicate_and_wait_as_in_the_table(tmp_path: Path) -> None:
    table = allowed_by_hook()
    assert table.keys() == {*HOOKS}
    keys = {**KEYS, "metrics.console": "off", "parallel.dp_replicate": 2}
    ranks = run_on_ranks(2, count_hooks, write_job(tmp_path, EVERYTHING), keys)
    (collectives, _), (others, _) = ranks
    assert collectives == others
    assert not [k for k, n in collectives.items() if n and table[k[0]].collectives != "yes"]
    assert collectives["after_step", "Health"]
    due = {("before_forward", "Replicas")}
    for _, waits in ranks:
        assert {key for key, n in waits.items() if n and table[key[0]].waits != "yes"} == due


def fit_with_trace(job: Path, keys: dict[str, Any]) -> None:
    as_rank()
    Trainer(load_job(job, {**keys, "metrics.console": "off"})).fit()


@pytest.mark.distributed
def test_the_example_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    keys: dict[str, Any] = {
        "callbacks.fisher.name": "examples.fisher_trace:FisherTrace",
        "callbacks.fisher.options": {"decay": 0.5},
        "schedule.name": "constant",
        "metrics.every_steps": 1,
        "train.steps": 6,
    }
    run_on_ranks(2, fit_with_trace, job, keys)
    parts = {**keys, "run.dir": str(tmp_path / "parts")}
    for steps in (3, 6):
        run_on_ranks(2, fit_with_trace, job, {**parts, "train.steps": steps})
    whole, stopped = (read_run(tmp_path / name).metrics for name in ("run", "parts"))
    assert whole["fisher_trace"] == stopped["fisher_trace"]
    total = weight = 0.0
    for norm, found in zip(whole["grad_norm"], whole["fisher_trace"], strict=True):
        total, weight = 0.5 * total + 0.5 * norm**2, 0.5 * weight + 0.5
        assert found == pytest.approx(total / weight, rel=1e-6)
