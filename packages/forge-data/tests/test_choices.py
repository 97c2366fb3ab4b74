"""Questions with several answers: their tokens, their problems by line, and which choice a model takes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forge_data import ByteTokenizer, InvalidData
from forge_data.choices import accuracies, batch_of_choices, read_questions, split_ids
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

BYTE = ByteTokenizer()


def questions_file(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def questions_of(path: Path, *records: dict[str, Any], seq_len: int = 8) -> list[Any]:
    return read_questions(questions_file(path, *records), BYTE, seq_len)


def test_white_space_after_a_prompt_goes_to_the_choice() -> None:
    assert split_ids(BYTE, "a ", "b") == ([97, 32, 98], 1)
    assert split_ids(BYTE, "a", " b") == ([97, 32, 98], 1)


def test_labels_are_those_of_the_choice_and_the_rest_is_masked(tmp_path: Path) -> None:
    record = {"prompt": "ab", "choices": ["c", "de"], "answer": 1}
    (question,) = questions_of(tmp_path / "q", record)
    batch = batch_of_choices(question.choices, 3, 4)
    assert batch.tokens.tolist() == [[97, 98, 0, 0], [97, 98, 100, 0], [0] * 4]
    assert batch.labels.tolist() == [[-100, 99, -100, -100], [-100, 100, 101, -100], [-100] * 4]
    assert batch.document_ids.tolist() == [[0, 0, -1, -1], [0, 0, 0, -1], [-1] * 4]
    assert batch.label_weight == 3.0


def test_the_lowest_loss_is_taken_by_text_and_by_byte(tmp_path: Path) -> None:
    record = {"prompt": "a", "choices": ["b", "cdef"], "answer": 1}
    questions = questions_of(tmp_path / "q", record, record)
    assert accuracies(questions, [[1.0, 2.0], [math.nan, 2.0]]) == (0.5, 1.0)
    assert accuracies(questions, [[1.0, 1.0], [1.0, 9.0]]) == (0.0, 0.5)


def test_problems_name_the_question(tmp_path: Path) -> None:
    good = {"prompt": "a", "choices": ["b", "c"], "answer": 0}
    with rejects("answer", 2, "range", InvalidData) as found:
        questions_of(tmp_path / "q", good, {**good, "answer": 2})
    assert found.value.problems[0].origin == f"{tmp_path / 'q'}, question 2"
    with rejects("prompt", 6, "length", InvalidData):
        questions_of(tmp_path / "q", {**good, "prompt": "abcde"}, seq_len=4)
    silent: Any = SimpleNamespace(encode=lambda text: [1])
    with rejects("choices", "b", "empty", InvalidData):
        read_questions(questions_file(tmp_path / "q", good), silent, 8)
