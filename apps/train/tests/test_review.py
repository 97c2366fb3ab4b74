"""Mistakes that a review of the runner found, one test each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forge_core.generate import generate_text
from forge_testing import write_job
from forge_testing.models import Counting
from forge_testing.problems import rejects
from forge_train import ConfigError, Trainer, load_job, load_trained, read_run
from forge_train.report.summary import print_summary, sample_text
from forge_train.run.callback import state_keys

pytestmark = pytest.mark.lane("test")


def test_an_imported_model_keeps_the_buffers_its_builder_made(tmp_path: Path) -> None:
    settings = {"model.name": "forge_testing.models:scaled", "sample.max_new_tokens": 0}
    trainer = Trainer(load_job(write_job(tmp_path), settings))
    trainer.prepare()
    assert torch.equal(trainer.model.scale, torch.full((3,), 2.5))


@pytest.mark.lane("quick")
def test_F113_logits_may_be_an_attribute_of_what_a_model_returns(tmp_path: Path) -> None:
    losses = []
    for name in ("bigram", "answering"):
        settings = {"model.name": f"forge_testing.models:{name}", "sample.max_new_tokens": 0}
        (tmp_path / name).mkdir()
        Trainer(load_job(write_job(tmp_path / name), {**settings, "train.steps": 3})).fit()
        metrics = read_run(tmp_path / name / "run").metrics
        losses.append((metrics["loss"], metrics["val_loss"]))
    assert losses[0] == losses[1]


def test_two_callbacks_of_one_class_have_states_of_their_own() -> None:
    one, other = Counting(), Counting()
    assert [*state_keys([one, other]).values()] == [one, other]


@pytest.mark.lane("quick")
def test_every_evaluation_and_the_last_step_have_a_row(tmp_path: Path) -> None:
    settings = {"metrics.every_steps": 10, "eval.every_steps": 5, "checkpoint.every_steps": 4}
    Trainer(load_job(write_job(tmp_path), settings)).fit()
    metrics = read_run(tmp_path / "run").metrics
    assert metrics["step"] == [5, 10, 12]
    assert None not in metrics["val_loss"]


@pytest.mark.parametrize("key", ["train.max_grad_norm", "sample.temperature", "optimizer.lr"])
def test_a_setting_that_is_no_number_is_rejected(tmp_path: Path, key: str) -> None:
    with rejects(key, float("nan"), "finite", ConfigError):
        load_job(write_job(tmp_path), {key: float("nan")})


def test_a_source_name_must_fit_a_flag(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    job.write_text(job.read_text().replace("data.sources.text", "data.sources.my-text"))
    with rejects("data.sources", "my-text", "name", ConfigError):
        load_job(job)


@pytest.mark.lane("quick")
def test_a_run_goes_on_with_its_own_model_only(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    Trainer(load_job(job, {"train.steps": 3})).fit()
    with rejects("model.rope_theta", 77.0, "fixed", ConfigError):
        Trainer(load_job(job, {"model.rope_theta": 77.0})).fit()


def test_F114_an_optimizer_that_cannot_run_is_rejected_before_anything_is_written(
    tmp_path: Path,
) -> None:
    """By all verbs, as it is a matter of the configuration."""
    for name in ("torch.optim:LBFGS", "forge_testing.models:bigram.nothing", "math:pi"):
        with pytest.raises(ConfigError, match=r"optimizer\.name"):
            load_job(write_job(tmp_path), {"optimizer.name": name})
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_F116_float8_recomputation_and_text_go_through_save_load_and_sample(tmp_path: Path) -> None:
    """What a CPU computes by emulation only, end to end as the command line does it."""
    float8 = {
        "parallel.precision": "bf16", "parallel.float8": "rowwise", "parallel.recompute": "full",
        "sample.max_new_tokens": 3, "model.dim": 32, "model.num_layers": 2, "metrics.console": "off",
    }  # fmt: skip
    job = load_job(write_job(tmp_path), {**float8, "train.steps": 2})
    trainer = Trainer(job)
    result = trainer.fit()
    text = sample_text(trainer)
    assert text.startswith("The ")
    assert (tmp_path / "run/sample.txt").read_text() == text + "\n"
    print_summary(trainer, result, [])
    again = Trainer(load_job(write_job(tmp_path), {**float8, "train.steps": 3}))
    assert again.fit().step == 3
    events = [event["event"] for event in read_run(tmp_path / "run").events]
    assert "resume" in events
    model, tokenizer, step = load_trained(tmp_path / "run")
    assert step == 3
    assert "".join(generate_text(model, tokenizer, tokenizer.encode("The "), 3))
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_a_sample_of_a_model_with_more_ids_than_the_tokenizer_has_texts(tmp_path: Path) -> None:
    """As imported models have: their vocabularies are padded."""
    sets = {"model.vocab_size": 4000, "train.steps": 1, "metrics.console": "off"}
    trainer = Trainer(load_job(write_job(tmp_path), {**sets, "sample.max_new_tokens": 30}))
    trainer.fit()
    assert "\N{REPLACEMENT CHARACTER}" in sample_text(trainer)
