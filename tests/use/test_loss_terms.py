"""z-loss and label smoothing of a run: the gradient contains them, `loss` and `val_loss` do not, rows name them.

Bound: fp32 1e-5 of max|a - b| / max|b|.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from forge_core import Transformer, initialize
from forge_data import Loader, open_stream
from forge_testing import forge_train
from forge_testing.runs import Fitted, assert_close, fit_alone, make_job
from forge_train import load_job, read_run

Z, SMOOTHING = 1e-2, 0.2
# fp32 of losses near 5, whose difference the column of label smoothing is
ROUNDING = 1e-6
KEYS: dict[str, Any] = {
    "model.num_layers": 2,
    "train.micro_batch": 3,
    "train.steps": 4,
    "eval.every_steps": 2,
    "sample.max_new_tokens": 0,
}
COLUMNS = ("loss", "val_loss", "grad_norm", "loss.z_loss", "loss.label_smoothing")


def with_terms(loss: str) -> dict[str, Any]:
    terms = {"z_loss": Z, "label_smoothing": SMOOTHING}
    return {**KEYS, "train.loss": loss, **{f"train.{loss}.{k}": v for k, v in terms.items()}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("terms")


@functools.cache
def alone(folder: Path) -> tuple[Fitted, dict[str, list[Any]]]:
    """One process with the loss of logits."""
    fitted = fit_alone(make_job(folder / "alone"), **with_terms("cross_entropy"))
    return fitted, rows_of(folder / "alone")


def rows_of(folder: Path) -> dict[str, list[Any]]:
    metrics = read_run(folder / "run").metrics
    return {name: [v for v in metrics[name] if v is not None] for name in COLUMNS}


def test_the_first_row_is_that_of_a_step_by_hand(folder: Path) -> None:
    _, rows = alone(folder)
    config = load_job(folder / "alone/job.toml", with_terms("cross_entropy")).config
    with torch.device("meta"):
        model = Transformer(config.model)
    initialize(model.to_empty(device="cpu"), config.run.seed)
    (source,) = config.data.sources.values()
    stream = open_stream(source, config.data.seq_len, config.run.seed)
    batch = next(Loader(stream, config.train.global_batch))
    logits = model(batch.tokens, batch.positions, batch.document_ids).double().flatten(0, 1)
    labels, valid = batch.labels.flatten(), (batch.labels != -100).flatten()
    plain = F.cross_entropy(logits, labels, reduction="sum")
    smoothed = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=SMOOTHING)
    z_loss = Z * (logits.logsumexp(-1).square() * valid).sum()
    ((smoothed + z_loss) / batch.label_weight).backward()
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    wanted = {"loss": plain, "loss.z_loss": z_loss, "loss.label_smoothing": smoothed - plain}
    for name, value in wanted.items():
        assert rows[name][0] == pytest.approx(
            float(value.detach()) / batch.label_weight, rel=1e-5, abs=ROUNDING
        ), name
    assert rows["grad_norm"][0] == pytest.approx(float(norm), rel=1e-5)


def test_F39_evaluation_is_the_plain_cross_entropy(folder: Path, tmp_path: Path) -> None:
    """With the learning rate 0 both runs evaluate the same weights."""
    still = {"optimizer.lr": 1e-30, "optimizer.weight_decay": 0.0}
    found = []
    for name, keys in (("plain", KEYS), ("terms", with_terms("cross_entropy"))):
        fit_alone(make_job(tmp_path / name), **{**keys, **still})
        rows = read_run(tmp_path / name / "run").metrics
        found.append([rows["loss"], rows["val_loss"]])
    assert found[0] == found[1]


@pytest.mark.lane("test")
def test_the_fused_loss_trains_and_logs_the_same(folder: Path, tmp_path: Path) -> None:
    """In one process; tests/equivalence has the layouts."""
    wanted, rows = alone(folder)
    got = fit_alone(make_job(tmp_path), **with_terms("fused_cross_entropy")).weights
    assert_close(got, wanted.weights)
    for name, column in rows_of(tmp_path).items():
        assert column == pytest.approx(rows[name], rel=1e-5, abs=ROUNDING), name


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.parametrize(
    ("flags", "named"),
    [
        pytest.param(
            ("--train.fused_cross_entropy.z_loss", "1e-4"),
            ("train.fused_cross_entropy.z_loss 0.0001", "'cross_entropy'"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            (
                "--train.cross_entropy.z_loss",
                "1e-4",
                "--train.objective",
                "forge_testing.extensions:smoothed",
            ),
            ("train.cross_entropy.z_loss 0.0001", "'cross_entropy'"),
            marks=pytest.mark.slow,
        ),
        (
            ("--train.cross_entropy.z_loss", "-1"),
            ("train.cross_entropy.z_loss -1.0",),
        ),
        (
            ("--train.cross_entropy.label_smoothing", "1"),
            ("train.cross_entropy.label_smoothing 1.0",),
        ),
    ],
    ids=str,
)
def test_tables_that_do_not_apply_are_rejected(
    tmp_path: Path, flags: tuple[str, ...], named: tuple[str, ...]
) -> None:
    told = forge_train("run", make_job(tmp_path), *flags)
    assert told.code == 78, told.err
    assert all(name in " ".join(told.err.split()) for name in named), told.err
