"""Schedule-free AdamW in the runner: trains at one point; evaluates, samples, saves and exports at the other."""

from __future__ import annotations

import itertools
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from forge_core import Transformer, TransformerConfig, initialize
from forge_core.optim import SCHEDULES, ScheduleConfig, build_schedule, schedule_warnings
from forge_data import Loader, PackedStream, SourceConfig, open_source
from forge_testing import write_job
from forge_testing.decay import groups_by_decay
from forge_testing.runs import (
    assert_close,
    fit_alone,
    fit_on_ranks,
    fit_reference,
    make_job,
    together,
)
from forge_train import Callback, Trainer, load_job, load_trained, read_run

pytestmark = pytest.mark.lane("test")

STEPS, WARMUP, PEAK, EPS, DECAY = 20, 3, 1e-2, 1e-4, 0.1
KEYS: dict[str, Any] = {
    "optimizer.name": "schedule_free_adamw",
    "schedule.name": "constant",
    "schedule.warmup_steps": WARMUP,
}
SHORT = {**KEYS, "train.steps": STEPS, "eval.every_steps": 0, "sample.max_new_tokens": 0}


def plain_loop() -> tuple[Transformer, Any, list[float]]:
    """The authors' optimizer, torch's loss and clipping, and none of the runner."""
    schedulefree = pytest.importorskip("schedulefree")
    model = Transformer(TransformerConfig(257, dim=16, num_layers=1, num_heads=2))
    initialize(model, 0)
    loader = Loader(PackedStream(open_source(SourceConfig()), 32, seed=0), 12, 0, 1)
    groups = groups_by_decay(model.named_parameters(), DECAY)
    optimizer = schedulefree.AdamWScheduleFree(groups, lr=PEAK, eps=EPS, warmup_steps=WARMUP)
    optimizer.train()
    losses = []
    for batch in itertools.islice(loader, STEPS):
        logits = model(batch.tokens, batch.positions, batch.document_ids)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
        losses.append(loss.item())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, losses


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_row_zero_twenty_steps_equal_the_authors_optimizer_in_a_loop_by_hand(
    tmp_path: Path,
) -> None:
    model, optimizer, losses = plain_loop()
    training = [p.detach().clone() for p in model.parameters()]
    optimizer.eval()
    seen: list[torch.Tensor] = []

    class Seen(Callback):
        def on_step_end(self, trainer: Trainer) -> None:
            seen[:] = [p.detach().clone() for p in trainer.model.parameters()]

    trainer = Trainer(load_job(make_job(tmp_path), SHORT), [Seen()])
    trainer.fit()
    assert read_run(tmp_path / "run").metrics["loss"] == pytest.approx(losses, rel=1e-5)
    for (name, mine), x, y, point in zip(
        trainer.model.named_parameters(), model.parameters(), training, seen, strict=True
    ):
        assert (mine - x).abs().max() <= 1e-5 * x.abs().max(), name
        assert (point - y).abs().max() <= 1e-5 * y.abs().max(), name
        assert (x - y).abs().max() >= 1e-4 * y.abs().max(), "the points hardly differ"


def loss_of(model: torch.nn.Module, trainer: Trainer) -> float:
    total, count = 0.0, 0.0
    for start in (0, 4):  # the 8 sequences of the evaluation
        from forge_data import batch_of

        batch = batch_of(trainer.run.evaluation.streams["validation"], range(start, start + 4))
        with torch.no_grad():
            logits = model(batch.tokens, batch.positions, batch.document_ids)
        losses = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
        total, count = total + float(losses), count + float((batch.labels != -100).sum())
    return total / count


def test_what_is_evaluated_sampled_saved_and_left_is_the_average(tmp_path: Path) -> None:
    at_y: list[float] = []

    class Look(Callback):
        def on_evaluation(self, trainer: Trainer, name: str, result: float) -> None:
            at_y.append(loss_of(trainer.model, trainer))
            with trainer.evaluation_point(), trainer.evaluation_point():
                assert loss_of(trainer.model, trainer) == pytest.approx(result, rel=1e-5)
            assert loss_of(trainer.model, trainer) == at_y[-1]

    job = load_job(write_job(tmp_path), {**KEYS, "eval.sequences": 8, "checkpoint.keep_last": 9})
    trainer = Trainer(job, [Look()])
    result = trainer.fit()
    events = [e for e in read_run(tmp_path / "run").events if e["event"] == "evaluation"]
    assert [e["step"] for e in events] == [6, 12]
    loaded = load_trained(tmp_path / "run")[0]  # what generate reads
    assert loss_of(loaded, trainer) == pytest.approx(result.val_loss, rel=1e-6)
    for a, b in zip(loaded.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert abs(at_y[-1] - result.val_loss) > 1e-3
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000012")
    halfway = load_trained(tmp_path / "run")[0]
    assert not torch.equal(halfway.lm_head.weight, loaded.lm_head.weight)


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.parametrize("first", [4, 7])
def test_a_run_that_stops_and_goes_on_has_the_same_bits(tmp_path: Path, first: int) -> None:
    """The undisturbed run saves and evaluates at other steps."""
    other = {**SHORT, "checkpoint.every_steps": 5, "eval.every_steps": 3}
    whole = fit_alone(make_job(tmp_path / "whole"), **other)
    job = make_job(tmp_path / "parts")
    half = fit_alone(job, **{**SHORT, "train.steps": first})
    parts = fit_alone(job, **SHORT)
    assert (half.step, parts.step, whole.step) == (first, STEPS, STEPS)
    assert parts.weights.keys() == whole.weights.keys()
    for name, value in whole.weights.items():
        assert torch.equal(parts.weights[name], value), name
    rows = [read_run(tmp_path / n / "run").metrics["loss"] for n in ("parts", "whole")]
    assert rows[0] == rows[1]


@pytest.mark.slow
@pytest.mark.distributed
def test_two_stages_and_one_process_go_on_from_each_other(tmp_path: Path) -> None:
    """Through evaluations and saves, of which each looks at the average."""
    keys = {**SHORT, "train.steps": 8, "eval.every_steps": 2, "checkpoint.every_steps": 2}
    keys["model.num_layers"] = 2
    wanted = fit_reference(make_job(tmp_path / "alone"), **keys).weights
    job, stages = make_job(tmp_path / "ranks"), {"parallel.pp": 2, "train.micro_batch": 3}
    begun = fit_on_ranks(2, job, **{**keys, **stages, "train.steps": 4})
    assert [b.problems for b in begun] == [()] * 2
    shutil.copytree(tmp_path / "ranks", tmp_path / "one")
    assert_close(together(fit_on_ranks(2, job, **keys, **stages)), wanted)
    text = (tmp_path / "one/job.toml").read_text()
    (tmp_path / "one/job.toml").write_text(text.replace("/ranks/run", "/one/run"))
    assert_close(fit_alone(tmp_path / "one/job.toml", **keys).weights, wanted)


class Peek(Callback):
    """Runs the model at both points, which leaves weights gathered."""

    def on_step_end(self, trainer: Trainer) -> None:
        tokens = torch.arange(8)[None]
        with torch.no_grad():
            before = trainer.model(tokens)
            with trainer.evaluation_point():
                average = trainer.model(tokens)
            after = trainer.model(tokens)
        assert torch.equal(before, after)
        assert trainer.progress.step == 1 or not torch.equal(before, average)


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.distributed
def test_looks_at_the_average_change_no_bits_on_a_rank_that_casts(tmp_path: Path) -> None:
    """On one bf16 rank every module stays gathered after a forward without gradients."""
    keys = {**SHORT, "train.steps": 6, "parallel.precision": "bf16"}
    runs = [
        fit_on_ranks(
            1,
            make_job(tmp_path / name),
            callback,
            **{k.replace(".", "__"): v for k, v in {**keys, "eval.every_steps": every}.items()},
        )[0]
        for name, every, callback in (("plain", 0, None), ("looked", 1, Peek))
    ]
    assert [run.problems for run in runs] == [(), ()]
    for name, weight in runs[0].weights.items():
        assert torch.equal(weight, runs[1].weights[name]), name


def test_a_rollback_goes_on_as_if_the_bad_steps_had_not_been(tmp_path: Path) -> None:
    class Poison(Callback):
        done = False

        def on_step_end(self, trainer: Trainer) -> None:
            if trainer.progress.step == 5 and not Poison.done:
                Poison.done = True
                with torch.no_grad():
                    next(iter(trainer.model.parameters())).fill_(math.nan)

    back = {"resilience.nonfinite.action": "rollback", "resilience.nonfinite.max_in_a_row": 0}
    keys = {**SHORT, **back, "train.steps": 8}
    trainer = Trainer(load_job(write_job(tmp_path), keys), [Poison()])
    assert trainer.fit().step == 8
    events = [e["event"] for e in read_run(tmp_path / "run").events]
    assert "rollback" in events
    assert all(p.isfinite().all() for p in trainer.model.parameters())
    assert all(
        torch.as_tensor(v).isfinite().all()
        for slots in trainer.optimizer.named_state().values()
        for v in slots.values()
    )


@pytest.mark.parametrize("name", SCHEDULES.built_in)
def test_F198_each_schedule_is_accepted_and_one_that_falls_warns(tmp_path: Path, name: str) -> None:
    own = {"optimizer.name": "schedule_free_adamw", "schedule.name": name}
    job = load_job(write_job(tmp_path), own)
    found = schedule_warnings(job.config.optimizer, job.config.schedule)
    assert len(found) == (name not in ("constant", "none"))
    other = load_job(write_job(tmp_path), {"schedule.name": name}).config
    assert schedule_warnings(other.optimizer, other.schedule) == []


def test_F198_a_run_with_a_schedule_that_falls_warns_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = {**SHORT, "schedule.name": "cosine", "train.steps": 4, "metrics.console": "plain"}
    trainer = Trainer(load_job(write_job(tmp_path), own))
    trainer.fit()
    assert capsys.readouterr().out.count("schedule: ") == 1
    wanted = build_schedule(ScheduleConfig("cosine", warmup_steps=WARMUP), 4)
    assert [lr for lr in read_run(tmp_path / "run").metrics["lr"] if lr] == pytest.approx(
        [PEAK * wanted(step) for step in range(1, 5)]
    )


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_the_authors_class_by_its_import_path_is_handled_alike(tmp_path: Path) -> None:
    """Any optimizer with `eval` and `train`; its state is torch's form, saved and loaded at the average."""
    pytest.importorskip("schedulefree")
    theirs = {
        "optimizer.name": "schedulefree:AdamWScheduleFree",
        "optimizer.betas": [0.9, 0.999],
    }
    fitted = []
    for name, more in (("ours", {}), ("theirs", theirs), ("parts", theirs)):
        (tmp_path / name).mkdir()
        job = write_job(tmp_path / name)
        for steps in (6, 12) if name == "parts" else (12,):
            trainer = Trainer(load_job(job, {**SHORT, **more, "train.steps": steps}))
            trainer.fit()
        fitted.append(dict(trainer.model.named_parameters()))
    for name, value in fitted[1].items():
        # twelve steps at a high rate: 1.6e-5 and 5e-6 with two sets of initial weights
        assert (fitted[0][name] - value).abs().max() <= 3e-5 * value.abs().max(), name
        assert torch.equal(fitted[2][name], value), name
