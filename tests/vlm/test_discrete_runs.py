"""Jobs that learn images as tokens, without an encoder: from a file of ids, in layouts, with the loss of each modality."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.vlm.file_jobs import BEGIN, END, FIRST, NUMBER, classes_of_images, ids_job, write_ids

from forge_core import SamplingConfig, generate
from forge_testing import forge_train
from forge_testing.runs import fit_alone, saved_tensors
from forge_train import Trainer, load_job, read_run

pytestmark = pytest.mark.lane("test")

FUSIONS = ("joint_decoder", "mixture_of_transformers", "moma")


def write_job(folder: Path) -> Path:
    return ids_job(folder, write_ids(folder))


def by_hand(job: Path, keys: dict[str, Any], steps: int) -> dict[str, float]:
    """The mean loss of each modality in the step behind `steps`, label by label, with the weights before it."""
    trainer = Trainer(load_job(job, keys))
    for _ in range(steps + 1):
        batch = next(trainer.loader)
    saved = saved_tensors(job.parent / "run", steps)
    model = trainer.model.to_empty(device="cpu")
    model.load_state_dict({n: saved[f"model.{n}"] for n in model.state_dict()})
    with torch.no_grad():
        logits = model(batch.tokens, batch.positions, batch.document_ids).double()
    losses: dict[str, list[float]] = {"text": [], "image": []}
    for row, labels in enumerate(batch.labels.tolist()):
        for t, label in enumerate(labels):
            if label >= 0:
                name = "image" if FIRST <= label < FIRST + NUMBER else "text"
                losses[name].append(-float(logits[row, t].log_softmax(-1)[label]))
    return {name: sum(values) / len(values) for name, values in losses.items()}


@pytest.mark.parametrize("fusion", FUSIONS)
def test_the_loss_of_each_modality_is_the_mean_over_its_labels(tmp_path: Path, fusion: str) -> None:
    job = write_job(tmp_path)
    keys = {"model.fusion.name": fusion, "checkpoint.every_steps": 3, "checkpoint.keep_last": 9}
    fit_alone(job, **keys)
    rows = read_run(tmp_path / "run").metrics
    for name, value in by_hand(job, keys, 3).items():
        assert rows[f"loss.modality.{name}"][-1] == pytest.approx(value, rel=1e-5), name
    assert rows["loss.modality.text"][-1] < math.log(32)


@pytest.mark.slow
@pytest.mark.parametrize("fusion", FUSIONS)
def test_a_trained_run_draws_what_it_is_asked_for(tmp_path: Path, fusion: str) -> None:
    fit_alone(write_job(tmp_path), **{"train.steps": 200, "model.fusion.name": fusion})
    trainer = Trainer(load_job(tmp_path / "job.toml", {"model.fusion.name": fusion}))
    model, saved = trainer.model.to_empty(device="cpu").eval(), saved_tensors(tmp_path / "run")
    model.load_state_dict({n: saved[f"model.{n}"] for n in model.state_dict()})
    asked = torch.tensor([[4 + kind, BEGIN] for kind in range(8)])
    drawn = generate(model, asked, 5, SamplingConfig(temperature=0.0))
    assert torch.equal(drawn[:, :4], torch.from_numpy(classes_of_images()))
    assert (drawn[:, 4] == END).all()


@pytest.mark.slow
def test_F129_a_job_is_checked_planned_and_explained(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    explained = forge_train("explain", job)
    assert explained.code == 0, explained.err
    planned = forge_train("plan", job, "--gpus", "8")
    assert planned.code == 0, planned.err
    assert "fits" in planned.out
