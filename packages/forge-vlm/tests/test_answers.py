"""Which answers are the same, and which questions cannot be compared."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from forge_vlm.answers import is_match, question_problems

pytestmark = pytest.mark.lane("test")


def test_two_answers_are_the_same_after_normalizing() -> None:
    pairs = [("red", "red"), (" red\n", "red"), ("The  Red.", "the red"), ("blue", "red")]
    found = {n: [is_match(a, b, n) for a, b in pairs] for n in ("none", "strip", "words")}
    assert found["none"] == [True, False, False, False]
    assert found["strip"] == [True, True, False, False]
    assert found["words"] == [True, True, True, False]


def test_questions_need_an_answer_and_room() -> None:
    def found(asked: list[Any], room: int | None = 8) -> list[tuple[Any, ...]]:
        problems = question_problems(asked, "q.jsonl", 4, room)
        return [(p.key, p.value, p.code) for p in problems]

    assert found([]) == [("path", "q.jsonl", "empty")]
    one = SimpleNamespace(tokens=[1] * 5, answer="yes", name="question 1")
    assert found([one]) == [("max_new_tokens", 4, "range")]
    assert found([one], None) == found([one], 9) == []
    one.answer = None
    assert found([one]) == [("path", "question 1", "answer")]
