"""Runs on mixtures of sources: the loss of each, the same data after a kill, and from phase to phase."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forge_data.prepare import prepare
from forge_testing import forge_train, kill_after_step, start
from forge_testing.problems import rejects
from forge_testing.runs import assert_same_bits, fit_alone, make_job, saved_tensors
from forge_train import ConfigError, DataError, Trainer, load_job, read_run
from forge_train.report.planned import planned

MIXTURE = """
[data.sources]
books = {{name = "tokens", path = "{books}", weight = 1.0}}
notes = {{name = "tokens", path = "{notes}", weight = 0.5, max_epochs = 2}}
[data.phases]
end = {{start_tokens = 3000, weights = {{text = 1.0, notes = 1.0}}, lr_multiplier = 0.25}}
"""
QUIET = {"metrics.console": "off", "sample.max_new_tokens": 0, "schedule.name": "constant"}


def write_tokens(folder: Path) -> Path:
    """Tokens of two sources, in folders of their names."""
    for name, words in (("books", "once upon a time\n" * 200), ("notes", "to do\n" * 300)):
        (folder / f"{name}.txt").write_text(words)
        prepare([folder / f"{name}.txt"], folder / name, document="line")
    return folder


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


def mixed_job(folder: Path, tokens: Path) -> Path:
    job = make_job(folder, MIXTURE.format(books=tokens / "books", notes=tokens / "notes"))
    job.write_text(job.read_text().replace('name = "builtin"', 'name = "builtin"\nweight = 2.0'))
    return job


def flat(**overrides: Any) -> dict[str, Any]:
    return QUIET | {key.replace("__", "."): value for key, value in overrides.items()}


def losses_by_source(job: Path, step: int, weights: dict[str, Any]) -> dict[str, float]:
    """The mean loss of each source's labels in a step, row by row, with the weights before it."""
    trainer = Trainer(load_job(job, flat(parallel__device="cpu")))
    for _ in range(step):
        batch = next(trainer.loader)
    model = trainer.model.to_empty(device="cpu")
    model.load_state_dict({name: weights[name] for name in model.state_dict()})
    found: dict[str, float] = {}
    for number, name in enumerate(trainer.config.data.sources):
        rows = batch.source == number
        with torch.no_grad():
            logits = model(batch.tokens[rows], document_ids=batch.document_ids[rows])
        labels = batch.labels[rows].flatten()
        if (labels >= 0).any():
            found[name] = float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels))
    return found


MTP = {"model.mtp.num_modules": 1, "train.cross_entropy.z_loss": 1e-4}


@pytest.mark.parametrize(
    ("loss", "more"), [("cross_entropy", {}), ("fused_cross_entropy", {}), ("cross_entropy", MTP)]
)
def test_the_loss_of_each_source_is_the_mean_over_its_labels(
    tmp_path: Path, tokens: Path, loss: str, more: dict[str, Any]
) -> None:
    job = mixed_job(tmp_path, tokens)
    keys = flat(train__loss=loss, parallel__precision="fp32") | more
    before = fit_alone(job, **keys | {"train.steps": 3}).weights
    want = losses_by_source(job, 4, before)
    rows = fit_alone(job, **keys | {"train.steps": 4}) and read_run(tmp_path / "run").metrics
    assert {*want} == {"text", "books", "notes"}
    for name, value in want.items():
        assert rows[f"loss.source.{name}"][-1] == pytest.approx(value, rel=1e-5), name


@pytest.mark.slow
def test_killed_it_goes_on_with_the_same_bits(tmp_path: Path, tokens: Path) -> None:
    job = mixed_job(tmp_path, tokens)
    flags = ["--schedule.name", "constant", "--checkpoint.wait", "true"]
    kill_after_step(start("run", job, *flags), tmp_path / "run/metrics.jsonl", 5)
    done = forge_train("run", job, *flags)
    assert done.code == 0, done.err
    fit_alone(mixed_job(tmp_path / "whole", tokens), **flat())
    assert_same_bits(saved_tensors(tmp_path / "run"), saved_tensors(tmp_path / "whole/run"))


def test_rows_come_in_the_proportions_of_their_phase(tmp_path: Path, tokens: Path) -> None:
    """Rows of 32 tokens: the phase begins with row 94, in the eighth step of 12 rows."""
    trainer = Trainer(load_job(mixed_job(tmp_path, tokens), flat()))
    sources = np.concatenate([next(trainer.loader).source.numpy() for _ in range(12)])
    before = np.bincount(sources[:94], minlength=3)
    assert np.abs(before - 94 * np.array([2.0, 1.0, 0.5]) / 3.5).max() <= 3
    assert np.bincount(sources[94:], minlength=3).tolist() == [25, 0, 25]
    plan = planned(load_job(mixed_job(tmp_path / "plan", tokens), flat()).config)
    rates = dict(zip(plan.steps, plan.rates["others"]))
    # a step counts as of the phase if all of its rows do
    assert (rates[8], rates[9]) == pytest.approx((1e-2, 2.5e-3))
    fit_alone(mixed_job(tmp_path / "run", tokens), **flat())
    metrics = read_run(tmp_path / "run/run").metrics
    assert metrics["lr"] == pytest.approx([rates[step] for step in metrics["step"]])


@pytest.mark.lane("test")
def test_sources_that_do_not_fit_are_rejected(tmp_path: Path, tokens: Path) -> None:
    job = mixed_job(tmp_path, tokens)
    with rejects("data.phases.end.weights", "text", "unknown", ConfigError):
        load_job(job_of_two(tmp_path / "two", tokens), flat())
    with rejects("data.sources.text.weight", ..., "missing", ConfigError):
        load_job(job, flat(data__sources__text__weight="none"))
    other = shutil.copytree(tokens / "notes", tmp_path / "notes")
    sidecar = next(other.glob("*.json"))
    assert "tokenizer" in sidecar.read_text()
    Trainer(load_job(job, flat()))
    with rejects("data.sources.notes.path", code="not_found", kind=(ConfigError, DataError)):
        load_job(job, flat(data__sources__notes__path=str(tmp_path / "nowhere")))


def job_of_two(folder: Path, tokens: Path) -> Path:
    job = mixed_job(folder, tokens)
    text = job.read_text()
    begin, end = text.index("[data.sources.text]"), text.index("[train]")
    job.write_text(text[:begin] + text[end:])
    return job


def test_another_mixture_is_another_run(tmp_path: Path, tokens: Path) -> None:
    job = mixed_job(tmp_path, tokens)
    fit_alone(job, **flat(train__steps=3))
    with rejects("fingerprint", ["mixture.from_0"], "mismatch", (ConfigError, DataError)):
        fit_alone(job, **flat(data__sources__text__weight=3.0))


@pytest.mark.lane("test")
def test_F210_a_mixture_that_ends_before_the_run_is_rejected(tmp_path: Path, tokens: Path) -> None:
    ends = {f"data__sources__{name}__max_epochs": 1 for name in ("books", "notes")}
    more = flat(**ends, data__sources__text__weight=0.0, data__phases__end__weights={"notes": 1.0})
    job = mixed_job(tmp_path, tokens)
    for changes, steps in (
        ({}, True),
        ({"train.global_batch": 4096, "train.micro_batch": 4096}, False),
    ):
        with rejects("data.sources", ..., "length", ConfigError) as caught:
            Trainer(load_job(job, {**more, "train.steps": 40, **changes}))
        # F210: a number of steps is recommended only where the data has a whole one
        assert bool(re.search(r"\d", caught.value.problems[0].fix)) == steps
    assert not (tmp_path / "run").exists()
