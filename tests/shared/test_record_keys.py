"""The shared topic `record_keys`: classes of keys, and names that one edit makes of another."""

from __future__ import annotations

import itertools
import re

import pytest

from forge_data._shared.problems import ProblemError
from forge_data._shared.record_keys import (
    Keys,
    RecordKeys,
    _is_edit,
    is_empty,
    option_problems,
    unread_keys,
)
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

READ = Keys(frozenset(("text", "id")), inside="row")


def edits(word: str) -> set[str]:
    """All words one edit away, of the letters a, b and c."""
    cuts = [(word[:i], word[i:]) for i in range(len(word) + 1)]
    less = {a + b[1:] for a, b in cuts if b}
    other = {a + c + b[1:] for a, b in cuts if b for c in "abc"}
    more = {a + c + b for a, b in cuts for c in "abc"}
    swapped = {a + b[1] + b[0] + b[2:] for a, b in cuts if len(b) > 1}
    return less | other | more | swapped


def test_F134_one_edit_is_a_letter_more_less_or_other_or_two_swapped() -> None:
    words = ["".join(w) for n in range(1, 5) for w in itertools.product("abc", repeat=n)]
    for a, b in itertools.product(words[:60], words):
        if a != b:
            assert _is_edit(a, b) == (a in edits(b)), (a, b)


def test_F134_each_class_of_keys() -> None:
    keys = RecordKeys(ignored=["tools", "row.loss"])
    record = {"text": "a", "id": 1, "images": [], "video": None, "url": "u", "di": 2}
    keys.check(READ, {**record, "tools": [1], "loss": False}, "here")
    assert keys.counts == {"row.url": 1, "row.di": 1, "row.tools": 1, "row.loss": 1}
    for key, code in {"images": "not_read", "weight": "not_read", "texts": "misspelt"}.items():
        with rejects(f"row.{key}", 0, code, ProblemError, where="here"):
            keys.check(READ, {"text": "a", key: 0}, "here")
    with rejects("row.url", "u", "strict", ProblemError, where="here"):
        RecordKeys(strict=True).check(READ, record, "here")
    assert [is_empty(v) for v in (None, "", [], {}, 0, False, b"", " ")] == [True] * 4 + [False] * 4


def test_keys_that_are_not_read_are_named_by_their_number() -> None:
    assert unread_keys({}) == ""
    line = unread_keys({"b": 1, "a": 1, "c": 2000})
    assert re.findall(r"(\w) \(([\d,]+)\)", line) == [("c", "2,000"), ("a", "1"), ("b", "1")]
    assert unread_keys({f"k{i:02}": 1 for i in range(15)}).endswith("k11 (1), 3 others")


@pytest.mark.parametrize(
    ("ignored", "strict", "wanted"),
    [
        ([], False, []),
        (("a",), True, []),
        ("a", False, ["ignore_keys"]),
        ([""], 1, ["ignore_keys", "strict"]),
    ],
)
def test_options_of_keys(ignored: object, strict: object, wanted: list[str]) -> None:
    assert [problem.key for problem in option_problems(ignored, strict)] == wanted
