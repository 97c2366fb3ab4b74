"""Weights that a callback changes around evaluations do not reach the training between them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forge_testing.runs import fit_on_ranks, make_job
from forge_train import Callback, Trainer

pytestmark = pytest.mark.distributed


class Doubled(Callback):
    """Evaluates with other weights, as one does with an average, and puts the own ones back."""

    def on_step_end(self, trainer: Trainer) -> None:
        self.parameters = list(trainer.model.parameters())  # held, as an optimizer does
        self.own = [parameter.detach().clone() for parameter in self.parameters]
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.mul_(2.0)
            trainer.model(torch.zeros(1, 8, dtype=torch.int64))

    def on_evaluation(self, trainer: Trainer, name: str, result: float) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.parameters, self.own, strict=True):
                parameter.copy_(value)


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.parametrize(("ranks", "precision"), [(2, "fp32"), (1, "bf16")])
def test_F88_an_evaluation_with_other_weights_changes_no_training(
    tmp_path: Path, ranks: int, precision: str
) -> None:
    settings = {"train__steps": 3, "eval__every_steps": 1, "parallel__precision": precision}
    runs = [
        fit_on_ranks(ranks, make_job(tmp_path / name), callback, **settings)[0]
        for name, callback in (("plain", None), ("doubled", Doubled))
    ]
    assert [run.problems for run in runs] == [(), ()]
    for name, weight in runs[0].weights.items():
        assert torch.equal(weight, runs[1].weights[name]), name
