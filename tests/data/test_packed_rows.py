"""A packed row trains a model as its documents apart do, whatever the packing; runs say how rows are filled."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from forge_core import Transformer, TransformerConfig, initialize
from forge_data import BuiltinCorpus, PackedStream, batch_of, open_training
from forge_data.describe import planned_rows
from forge_data.packing import packing_report
from forge_data.packing_config import PackingConfig
from forge_data.stored_plan import open_plan
from forge_testing.runs import make_job
from forge_train import Trainer, load_job, read_run

pytestmark = pytest.mark.lane("test")

POLICIES = ("concatenate", "first_fit", "best_fit")


def short_documents() -> BuiltinCorpus:
    """The built-in text, a border behind every few words."""
    source = BuiltinCorpus("validation")
    ends = np.cumsum(1 + np.random.default_rng(0).integers(0, 60, source.num_tokens))
    source.documents = np.concatenate([np.zeros(1, np.int64), ends[ends < source.num_tokens]])
    return source


@pytest.mark.parametrize("policy", POLICIES)
def test_F47_a_packed_row_gives_the_loss_and_gradients_of_its_documents_apart(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORGE_CACHE", str(tmp_path))
    source = short_documents()
    packing = PackingConfig(policy)  # type: ignore[arg-type]
    plan = None if policy == "concatenate" else open_plan(source, 48, packing)
    batch = batch_of(PackedStream(source, 48, seed=1, plan=plan), range(4))
    model = Transformer(TransformerConfig(vocab_size=256, dim=32, num_layers=2, num_heads=2))
    initialize(model, 0)
    model.double()

    def gradients(loss: torch.Tensor) -> dict[str, torch.Tensor]:
        model.zero_grad()
        loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    logits = model(batch.tokens, batch.positions, batch.document_ids)
    packed = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
    together = gradients(packed)
    apart = packed.new_zeros(())
    pieces = 0
    for tokens, labels, ids in zip(batch.tokens, batch.labels, batch.document_ids):
        for document in range(int(ids.max()) + 1):
            own = ids == document
            found = model(tokens[own][None])[0]  # positions from 0, no other document
            apart = apart + F.cross_entropy(found, labels[own], reduction="sum")
            pieces += 1
    assert pieces > 6
    torch.testing.assert_close(packed, apart, rtol=1e-12, atol=0)
    for name, gradient in gradients(apart).items():
        torch.testing.assert_close(together[name], gradient, rtol=1e-9, atol=1e-12, msg=name)


def test_a_run_reports_how_its_sequences_are_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORGE_CACHE", str(tmp_path / "cache"))
    job = make_job(tmp_path, "")
    trainer = Trainer(load_job(job, {"data.packing.name": "best_fit", "train.steps": 2}))
    report = trainer.loader.stream.report()  # type: ignore[attr-defined]
    trainer.fit()
    (start,) = (e for e in read_run(trainer.paths.path).events if e["event"] == "start")
    assert start["packing"] == {"data": report}
    assert f" {report['cut_documents']:,} documents " in capfd.readouterr().out


def test_explain_shows_the_effect_of_packing_on_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORGE_CACHE", str(tmp_path / "cache"))
    packed = {"data.packing.name": "best_fit", "data.packing.best_fit.window": 9}
    config = load_job(make_job(tmp_path), packed).config.data
    (said,) = planned_rows(config)
    assert not (tmp_path / "cache").exists(), "nothing is written"
    found = packing_report(open_training(config))["data"]
    padding = 1 - found["utilisation"]
    assert said == (
        f"data.sources.text: best_fit, {found['rows']:,} rows of 32 tokens, {padding:.2%} of them padding, "
        f"{found['cut_documents']:,} documents cut"
    )
    monkeypatch.setattr("forge_data.describe._PLANNED_AT_ONCE", 3)
    (said,) = planned_rows(config)
    assert said.endswith(
        f"by `forge-train run` for {BuiltinCorpus('train').num_documents:,} documents"
    )
    assert not [*planned_rows(load_job(make_job(tmp_path), {}).config.data)]
