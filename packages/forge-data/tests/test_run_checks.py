"""What is rejected of the sources of a run, before the run begins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from forge_data import DataConfig, InvalidData, SourceConfig, TrainingSourceConfig
from forge_data import run_checks as checks
from forge_data._shared.problems import Problem
from forge_data.phase_schedule import PhaseSchedule
from forge_data.run_checks import label_problem
from forge_data.sources import open as opening
from forge_testing.problems import assert_problem, rejects

Fake: Any = SimpleNamespace
FIX = "set other"


def found(problems: Any, key: str, value: Any, code: str) -> None:
    """Assert that a check found this problem."""
    assert_problem(InvalidData(problems), key, value, code)


def test_rows_of_a_length_that_a_source_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Fake(name="text")
    source = Fake(row_problems=lambda length: [Problem("", "short", length, "")])
    monkeypatch.setattr(checks, "open_source", lambda table: source)
    monkeypatch.setattr(checks, "open_header", lambda table, check: source)
    with rejects("data.sources.a", 16, "short", InvalidData):
        checks.tokenize_sources({"data.sources.a": (table, {16})})


def test_all_sources_are_looked_at_before_the_first_is_tokenized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "open_source", lambda table: pytest.fail("tokenized"))
    tables = {"a": (SourceConfig("text", path="missing"), {16}), "b": (SourceConfig(), {16})}
    with pytest.raises(InvalidData) as caught:
        checks.tokenize_sources(tables, {"a": FIX})
    (problem,) = caught.value.problems
    assert problem.key == "a.path"
    assert problem.fix.endswith(FIX)


def test_ids_without_a_row_in_the_model() -> None:
    source = Fake(max_token_id=10, vocab_size=12)
    assert not checks.token_id_problems("a", source, 11)
    assert not checks.token_id_problems("a", source, 8, 3)
    found(checks.token_id_problems("a", source, 10), "a", 10, "token_id")


def test_streams_that_do_not_fit_the_steps() -> None:
    schedule = PhaseSchedule(DataConfig(sources={"a": TrainingSourceConfig()}), 4)
    assert schedule.end_problem(Fake(end=16), 4) is None
    found([schedule.end_problem(Fake(end=15), 4)], "sources", ..., "length")
    found(checks.group_problems(Fake(group=4), "a", 8, 2), "a.group", 4, "sources")
    found(checks.group_problems(Fake(group=4), "a", 8), "a.group", 4, "mismatch")


def test_a_stream_without_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forge_data.run_checks.has_label", lambda stream, rows: False)
    found([label_problem("a", range(3), 8)], "a", "3 sequences", "no_labels")  # type: ignore[arg-type]
    assert label_problem("a", Fake(num_shards=2), 8) is None


def test_ids_without_a_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "open_header", lambda table: Fake(tokenizer=None))
    with rejects("source", "runs/a", "tokenizer"):
        opening.tokenizer_of(Fake(path="runs/a"))
