"""Data that changed between two lives of a run: refused with what differs, or accepted and recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forge_data.prepare import prepare
from forge_testing.problems import rejects
from forge_testing.runs import assert_same_bits, fit_alone, make_job, saved_tensors
from forge_train import ConfigError, DataError, StateError, Trainer, load_job, read_run

SOURCES = """
[data.sources.books]
name = "tokens"
path = "{books}"
weight = 1.0
"""
QUIET: dict[str, Any] = {
    "metrics.console": "off",
    "sample.max_new_tokens": 0,
    "schedule.name": "constant",
    "data.sources.text.weight": 2.0,
}


def write_books(path: Path, words: str) -> None:
    path.with_suffix(".txt").write_text(words * 300)
    prepare([path.with_suffix(".txt")], path, document="line", overwrite=path.exists())


@pytest.fixture
def job(tmp_path: Path) -> Path:
    write_books(tmp_path / "books", "once upon a time\n")
    return make_job(tmp_path, SOURCES.format(books=tmp_path / "books"))


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_other_text_is_rejected_or_accepted_and_recorded(job: Path) -> None:
    fit_alone(job, **QUIET | {"train.steps": 4})
    write_books(job.parent / "books", "there was a king\n")
    again = QUIET | {"train.steps": 8}
    with rejects("fingerprint", code="mismatch", kind=DataError) as refused:
        Trainer(load_job(job, again)).fit()
    assert "books.source.tokens: checkpoint " in str(refused.value)
    assert "accept_change" in str(refused.value)
    Trainer(load_job(job, again | {"data.accept_change": True})).fit()
    run = read_run(job.parent / "run")
    (resumed,) = [e for e in run.events if e["event"] == "resume"]
    assert {"books.source.tokens"} <= {*resumed["data_changed"]}
    assert run.metrics["step"] == [*range(1, 9)]
    Trainer(load_job(job, again | {"train.steps": 9})).fit()  # what was accepted once is the run's
    assert "data_changed" not in read_run(job.parent / "run").events[-3]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data.packing.name": "best_fit"}, "packing.policy"),
        ({"data.sources.more.name": "builtin", "data.sources.more.weight": 1.0}, "more.source"),
        ({"data.sources.books.split": "train", "data.seed": 9}, "order.seed"),
        ({"data.sources.books.max_epochs": 90}, "books.max_epochs"),
        (
            {"data.phases.end.start_instance": 13, "data.phases.end.weights": {"text": 1.0}},
            "from_13",
        ),
    ],
)
def test_each_change_is_named_and_can_be_accepted(
    job: Path, change: dict[str, Any], words: str
) -> None:
    fit_alone(job, **QUIET | {"train.steps": 2})
    again = QUIET | change | {"train.steps": 4}
    with rejects("fingerprint", code="mismatch", kind=DataError, where=words):
        Trainer(load_job(job, again)).fit()
    Trainer(load_job(job, again | {"data.accept_change": True})).fit()
    (resumed,) = [e for e in read_run(job.parent / "run").events if e["event"] == "resume"]
    assert any(words in key for key in resumed["data_changed"])


@pytest.mark.slow
def test_a_phase_that_is_still_to_come_may_be_added_moved_and_left_out(tmp_path: Path) -> None:
    def settings(start: int, **more: Any) -> dict[str, Any]:
        phase = {"start_instance": start, "seq_len": 48, "weights": {"books": 1.0}}
        return QUIET | {f"data.phases.end.{key}": value for key, value in phase.items()} | more

    jobs = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_books(tmp_path / name / "books", "once upon a time\n")
        text = SOURCES.format(books=tmp_path / name / "books")
        jobs.append(make_job(tmp_path / name, text))
    late, whole = jobs
    length = {"model.max_seq_len": 48}
    fit_alone(late, **QUIET | length | {"train.steps": 3})
    fit_alone(late, **settings(100) | length | {"train.steps": 4})
    fit_alone(late, **settings(60) | length | {"train.steps": 8})
    fit_alone(whole, **settings(60) | length | {"train.steps": 8})
    assert_same_bits(saved_tensors(tmp_path / "a/run"), saved_tensors(tmp_path / "b/run"))
    with rejects("fingerprint", code="mismatch", kind=DataError, where="from_60"):
        Trainer(load_job(late, settings(61) | length | {"train.steps": 9})).fit()
    accepted = QUIET | length | {"train.steps": 9, "data.accept_change": True}
    with rejects("data.phases", ..., "changed", StateError):
        Trainer(load_job(late, accepted)).fit()
    assert not (tmp_path / "a/run/quarantine").exists()
    assert not [*(tmp_path / "a/run").rglob("quarantine/*")]


def test_a_truncated_file_is_damage_whatever_is_accepted(job: Path) -> None:
    fit_alone(job, **QUIET | {"train.steps": 2})
    path = next((job.parent / "books").glob("*tokens.bin"))
    path.write_bytes(path.read_bytes()[:-8])
    with rejects("data.sources.books", 10192, "length", (ConfigError, DataError)):
        Trainer(load_job(job, QUIET | {"train.steps": 4, "data.accept_change": True})).fit()
