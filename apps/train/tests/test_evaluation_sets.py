"""Named sets and questions with choices of a run, against loops by hand, in every layout."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from forge_testing.evaluations import QUESTIONS, SETS, asked, losses_by_hand, rows_of
from forge_testing.problems import rejects
from forge_testing.runs import fit_alone, fit_on_ranks, make_job, together
from forge_train import Callback, ConfigError, DataError, Trainer, load_job, read_run
from forge_train.jobs import load_trained

pytestmark = pytest.mark.lane("test")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process with sets and questions, evaluated from its first weights on."""
    job = make_job(tmp_path_factory.mktemp("alone"))
    overrides = {**asked(job.parent), "eval.at_start": True}
    trainer = Trainer(load_job(job, overrides), [Heard(), KeepsLosses()])
    assert trainer.fit().step == 6
    return job


class Heard(Callback):
    heard: ClassVar[list[tuple[int, str, float]]] = []

    def on_evaluation(self, trainer: Trainer, name: str, result: float) -> None:
        self.heard.append((trainer.progress.step, name, result))


class KeepsLosses(Callback):
    """Writes the nats of each choice at the end; `modes` says whether each module kept its mode (F160)."""

    modes: ClassVar[list[bool]] = []

    def on_end(self, trainer: Trainer) -> None:
        asked = trainer.run.evaluation.parts["code"]
        modules = list(trainer.model.modules())
        modules[-1].eval()  # of a model in training mode
        before = [module.training for module in modules]
        found = asked.losses(trainer.run.compute, trainer.run.agreement)
        self.modes.append([module.training for module in modules] == before)
        if trainer.meshes.rank == 0:
            (trainer.paths.path / "choices.json").write_text(json.dumps(found))


def kept(job: Path) -> list[list[float]]:
    found: list[list[float]] = json.loads((job.parent / "run" / "choices.json").read_text())
    return found


def test_each_set_has_its_interval_and_all_are_read_at_both_ends(alone: Path) -> None:
    found = rows_of(alone)
    steps = {
        name: [step for step, row in found.items() if name in row]
        for name in ("val_loss", "eval/seen/loss", "eval/held/loss", "eval/code/accuracy")
    }
    assert steps["val_loss"] == steps["eval/held/loss"] == [0, 2, 4, 6]
    assert steps["eval/code/accuracy"] == [0, 2, 4, 6]
    assert steps["eval/seen/loss"] == [0, 3, 6]
    assert [(s, n) for s, n, _ in Heard.heard if s == 3] == [(3, "seen")]
    assert {n for s, n, _ in Heard.heard if s == 0} == {"validation", "seen", "held"}


def test_metrics_have_a_row_of_step_0_and_the_columns_of_each_set(alone: Path) -> None:
    metrics, found = read_run(alone.parent / "run").metrics, rows_of(alone)
    assert metrics["step"] == [0, 1, 2, 3, 4, 5, 6]
    assert metrics["loss"][0] is None
    assert metrics["val_loss"][0] == found[0]["val_loss"] == pytest.approx(math.log(257), abs=0.2)
    own = ("eval/seen/loss", "eval/held/bits_per_byte", "eval/code/accuracy_per_byte")
    for column in ("val_bits_per_byte", *own):
        assert metrics[column] == [found.get(step, {}).get(column) for step in range(7)]


def test_measures_are_those_of_a_loop_by_hand(alone: Path) -> None:
    model, _, step = load_trained(alone.parent / "run")
    last, seq_len = rows_of(alone)[step], load_job(alone).config.data.seq_len
    for name, split, rows in (("seen", "train", 7), ("held", "validation", 5)):
        nats, labels, size = losses_by_hand(model, split, rows, seq_len)
        assert last[f"eval/{name}/loss"] == pytest.approx(nats / labels, rel=1e-6)
        assert last[f"eval/{name}/perplexity"] == pytest.approx(math.exp(nats / labels), rel=1e-6)
        bits = nats / math.log(2) / size
        assert last[f"eval/{name}/bits_per_byte"] == pytest.approx(bits, rel=1e-6)
    assert last["val_loss"] == last["eval/held/loss"]
    assert last["val_bits_per_byte"] == last["eval/held/bits_per_byte"]


def choices_by_hand(model: Any, tokenizer: Any) -> list[list[float]]:
    """Nats of each choice by one forward without any filling, in float64."""
    model, found = model.double(), []
    for prompt, choices, _ in QUESTIONS:
        nats = []
        for choice in choices:
            ids = tokenizer.encode(prompt + choice)
            begin = len(tokenizer.encode(prompt.rstrip()))
            with torch.no_grad():
                logs = model(torch.tensor([ids]))[0].log_softmax(-1)
            nats.append(-sum(float(logs[t - 1, ids[t]]) for t in range(begin, len(ids))))
        found.append(nats)
    return found


def test_F160_modules_keep_their_mode_through_choices(alone: Path) -> None:
    assert KeepsLosses.modes
    assert all(KeepsLosses.modes)


def test_choices_have_the_nats_of_one_forward_each(alone: Path) -> None:
    model, tokenizer, step = load_trained(alone.parent / "run")
    wanted = choices_by_hand(model, tokenizer)
    for got, own in zip(kept(alone), wanted, strict=True):
        assert got == pytest.approx(own, rel=1e-6)
    plain = per_byte = 0
    for (_, choices, answer), nats in zip(QUESTIONS, wanted):
        plain += nats.index(min(nats)) == answer
        by_byte = [n / len(c.encode()) for n, c in zip(nats, choices)]
        per_byte += by_byte.index(min(by_byte)) == answer
    last = rows_of(alone)[step]
    assert last["eval/code/accuracy"] == plain / len(QUESTIONS)
    assert last["eval/code/accuracy_per_byte"] == per_byte / len(QUESTIONS)
    assert 0 < plain < len(QUESTIONS)  # or every mistake would show the same


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "overrides"),
    [
        (2, {"parallel__dp_shard": 2}),
        (3, {"parallel__dp_replicate": 3}),
        (2, {"parallel__tp": 2}),
        (2, {"parallel__tp": 2, "train__loss": "fused_cross_entropy"}),
        (2, {"parallel__tp": 2, "parallel__sequence_parallel": False}),
        (2, {"parallel__cp": 2}),
        (2, {"parallel__pp": 2, "train__micro_batch": 3}),
        (2, {"parallel__pp": 2, "train__micro_batch": 3, "train__loss": "fused_cross_entropy"}),
        (4, {"parallel__pp": 2, "parallel__dp_shard": 2, "train__micro_batch": 3}),
        (4, {"parallel__tp": 2, "parallel__dp_shard": 2}),
        (4, {"parallel__cp": 2, "parallel__tp": 2}),
    ],
)
def test_every_layout_measures_alike(
    alone: Path, tmp_path: Path, world: int, overrides: dict[str, Any]
) -> None:
    job = make_job(tmp_path)
    fitted = fit_on_ranks(world, job, KeepsLosses, **overrides, **asked(alone.parent), **{"eval.at_start": True})  # fmt: skip
    together(fitted)
    assert_alike(rows_of(job), rows_of(alone))
    for got, wanted in zip(kept(job), kept(alone), strict=True):
        assert got == pytest.approx(wanted, rel=1e-5)


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_mixtures_over_expert_ranks_measure_alike(alone: Path, tmp_path: Path) -> None:
    moe = {"model.moe.num_experts": 4, "model.moe.top_k": 2, **asked(alone.parent)}
    one, two = make_job(tmp_path / "one"), make_job(tmp_path / "two")
    fit_alone(one, **moe)
    fit_on_ranks(2, two, None, **moe, **{"parallel.ep": 2, "parallel.dp_shard": 2})
    assert_alike(rows_of(two), rows_of(one))


def assert_alike(got: dict[int, Any], wanted: dict[int, Any]) -> None:
    assert got.keys() == wanted.keys()
    for step, row in wanted.items():
        columns = {k: v for k, v in row.items() if k.startswith(("val_", "eval/"))}
        assert len(columns) >= 1
        assert {k: got[step][k] for k in columns} == pytest.approx(columns, rel=1e-5), step


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_a_run_that_died_before_its_first_save_has_one_row_of_step_0(tmp_path: Path) -> None:
    class Dies(Callback):
        def on_step_end(self, trainer: Trainer) -> None:
            raise KeyboardInterrupt(f"step_{trainer.progress.step}")

    job = make_job(tmp_path)
    overrides = {**SETS, "eval.at_start": True}
    with pytest.raises(KeyboardInterrupt, match=r"^step_1$"):
        Trainer(load_job(job, overrides), [Dies()]).fit()
    fit_alone(job, **overrides)
    assert read_run(job.parent / "run").metrics["step"] == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_the_weights_do_not_depend_on_what_is_evaluated(alone: Path, tmp_path: Path) -> None:
    one, other = make_job(tmp_path / "one"), make_job(tmp_path / "other")
    plain = fit_alone(
        one,
        **{
            "eval.every_steps": 0,
            "metrics.console": "off",
            "train.steps": 6,
            "model.num_layers": 2,
        },
    ).weights
    seen = fit_alone(other, **{**asked(alone.parent), "eval.at_start": True, "parallel.precision": "fp32"}).weights  # fmt: skip
    assert plain.keys() == seen.keys()
    assert all(torch.equal(plain[name], seen[name]) for name in plain)


@pytest.mark.lane("quick")
@pytest.mark.parametrize(
    ("line", "key", "value", "code"),
    [
        ('{"prompt": "a"}', "", {"prompt": "a"}, "type"),
        ('{"prompt": " ", "choices": ["a", "b"], "answer": 0}', ".prompt", " ", "type"),
        ('{"prompt": "a", "choices": ["a"], "answer": 0}', ".choices", ["a"], "type"),
        ('{"prompt": "a", "choices": ["a", ""], "answer": 0}', ".choices", ["a", ""], "type"),
        ('{"prompt": "a", "choices": ["a", "b"], "answer": 2}', ".answer", 2, "range"),
        ('{"prompt": "a", "choices": ["a", "b"], "answer": true}', ".answer", True, "range"),
        (
            json.dumps({"prompt": "a" * 99, "choices": ["a", "b"], "answer": 0}),
            ".prompt",
            100,
            "length",
        ),
        ("nonsense", "", ..., "not_json"),
    ],
)
def test_questions_without_an_answer_are_rejected_by_line(
    tmp_path: Path, line: str, key: str, value: Any, code: str
) -> None:
    job, path = make_job(tmp_path), tmp_path / "q.jsonl"
    path.write_text(f"\n{line}")
    with rejects(f"eval.choices.mine{key}", value, code, DataError) as found:
        Trainer(load_job(job, {"eval.choices.mine.path": str(path), "data.seq_len": 64}))
    assert found.value.problems[0].origin == f"{path}, question 1"


def test_files_without_questions_are_rejected(tmp_path: Path) -> None:
    job, path = make_job(tmp_path), tmp_path / "q.jsonl"
    flags = {"eval.choices.mine.path": str(path), "data.seq_len": 64}
    path.write_text("\n")
    with rejects("eval.choices.mine.path", str(path), "empty", DataError):
        Trainer(load_job(job, flags))
    path.write_bytes(b"\xff")
    with rejects("eval.choices.mine.path", str(path), "read", DataError):
        Trainer(load_job(job, flags))
    path.write_text(json.dumps({"prompt": "a", "choices": ["b", "c"], "answer": 0}))
    objective = {"train.objective": "forge_testing.extensions:smoothed"}
    with rejects("eval.choices.mine", ..., "objective", DataError):
        Trainer(load_job(job, {**flags, **objective}))


@pytest.mark.parametrize(
    ("overrides", "key", "value", "code"),
    [
        ({"eval.every_steps": 0}, "eval.sets.more", ..., "never_read"),
        ({"eval.sets.more.sequences": 0}, "eval.sets.more.sequences", 0, "range"),
        ({"eval.sets.validation.split": "train"}, "eval.sets.validation", ..., "validation"),
        ({"eval.choices.more.path": "q.jsonl"}, "eval.sets.more", ..., "duplicate"),
        ({"eval.choices.other.samples": 3}, "eval.choices.other.path", None, "missing"),
        ({"eval.sets.more.squences": 3}, "eval.sets.more.squences", ..., "unknown_key"),
    ],
)
def test_tables_that_would_never_be_read_are_rejected(
    tmp_path: Path, overrides: dict[str, Any], key: str, value: Any, code: str
) -> None:
    job = make_job(tmp_path)
    with rejects(key, value, code, ConfigError):
        load_job(job, {"eval.sets.more.split": "validation", **overrides})


def test_a_set_whose_file_is_missing_is_named(tmp_path: Path) -> None:
    own = {"eval.sets.more.name": "tokens", "eval.sets.more.path": str(tmp_path / "none")}
    with pytest.raises((ConfigError, DataError)) as caught:
        load_job(make_job(tmp_path), own)
    assert all(p.key.startswith("eval.sets.more") for p in caught.value.problems)
