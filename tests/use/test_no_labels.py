"""Rows without a label: no loss, no update, and an error where a whole set has none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from tests.use.test_fused_loss import Weighted, WeightedRows

from forge_testing.problems import ANY, rejects
from forge_testing.runs import make_job
from forge_train import Callback, DataError, Trainer, load_job, read_run

pytestmark = pytest.mark.lane("test")
KEYS: dict[str, Any] = {
    "model.vocab_size": 64,
    "train.steps": 4,
    "checkpoint.every_steps": 0,
    "sample.max_new_tokens": 0,
    "metrics.console": "off",
    "train.cross_entropy.z_loss": 1e-3,
    "resilience.spike": {"action": "skip", "window": 2, "sigma": 1000.0},
}


class GapRows(WeightedRows):
    """The twelve rows of the second step have no label."""

    bare = range(12, 24)

    def _row(self, i: int) -> dict[str, np.ndarray]:
        row = super()._row(i)
        if i in self.bare:
            row["weights"][:] = 0
        return row


class Gap(Weighted):
    rows = GapRows


class BareRows(GapRows):
    bare = range(2000)


class Bare(Weighted):
    rows = BareRows


class Weights(Callback):
    seen: ClassVar[list[dict[str, torch.Tensor]]] = []

    def on_step_end(self, trainer: Trainer) -> None:
        model = trainer.model.state_dict()
        self.seen.append({name: value.clone() for name, value in model.items()})


def test_F205_a_step_without_labels_has_no_loss_and_changes_nothing(tmp_path: Path) -> None:
    Weights.seen.clear()
    job = make_job(tmp_path)
    keys = {**KEYS, "data.sources.text.name": f"{__name__}:Gap", "eval.every_steps": 0}
    trainer = Trainer(load_job(job, keys), [Weights()])
    trainer.fit()
    run = read_run(tmp_path / "run")
    loss, z_loss = run.metrics["loss"], run.metrics["loss.z_loss"]
    assert [x is None for x in loss] == [x is None for x in z_loss] == [False, True, False, False]
    assert run.metrics["skipped_steps"] == [0, 1, 0, 0]
    one, two, three, _ = Weights.seen
    assert all(torch.equal(one[name], two[name]) for name in one)  # no decay either
    assert not all(torch.equal(two[name], three[name]) for name in two)
    window = trainer.progress.policy.state_dict()["window"][0]
    assert window == pytest.approx([loss[2], loss[3]])
    (event,) = (e for e in run.events if e["event"] == "skip")
    assert (event["step"], event["unlabeled"]) == (2, 1)


def test_F205_data_without_any_label_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    job, bare = make_job(tmp_path), f"{__name__}:Bare"
    with rejects("data.sources", "48 sequences", "no_labels", DataError):
        Trainer(load_job(job, {**KEYS, "data.sources.text.name": bare}))
    trained = {**KEYS, "data.sources.text.name": f"{__name__}:Gap"}
    with rejects("data.validation", "4 sequences", "no_labels", DataError):
        Trainer(load_job(job, {**trained, "data.validation.name": bare}))
    with rejects("eval.sets.other", ANY, "no_labels", DataError):
        Trainer(load_job(job, {**trained, "eval.sets.other.name": bare}))


def test_F205_warnings_of_held_out_sets_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What the stream of a held-out set has to say, as that of the training data."""
    monkeypatch.setattr(WeightedRows, "warnings", ["1 of 2 rows"], raising=False)
    job = make_job(tmp_path)
    keys = {**KEYS, "data.sources.text.name": f"{__name__}:Gap", "train.steps": 1}
    keys |= {"metrics.console": "plain", "data.validation.name": f"{__name__}:Gap",
             "data.validation.split": "validation"}  # fmt: skip
    Trainer(load_job(job, keys)).fit()
    assert "data: data.validation: 1 of 2 rows" in capfd.readouterr().out
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert events[0]["data"] == ["1 of 2 rows", "data.validation: 1 of 2 rows"]
