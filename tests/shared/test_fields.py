"""The shared topic `fields`, by the copy of one package; `check` compares the bytes of the others."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import MISSING, asdict, dataclass
from typing import Any, Literal

import pytest

from forge_testing.problems import rejects
from forge_train._shared.fields import Checked, field
from forge_train._shared.problems import Problem

pytestmark = pytest.mark.lane("test")


@dataclass(frozen=True)
class Config(Checked):
    name: str = field(MISSING, "a name")
    steps: int | None = field(None, "steps", (1, 10**9))
    clip: float = field(1.0, "limit", (0, math.inf), positive=True)
    from_: int = field(0, between=(0, 5))
    """a word of Python"""
    table: dict[str, Any] = field(dict, "a table", path=True)
    kind: Literal["a", "b"] = "a"
    maybe: Literal["c"] | None = None
    several: tuple[Literal["d"], ...] = ("d", "d")

    def _problems(self) -> Iterator[Problem]:
        if self.name == "bad":
            yield Problem("name", "unknown", self.name, "is bad")


def test_defaults_and_metadata_are_those_of_a_field() -> None:
    wanted = {"name": "a", "steps": None, "clip": 1.0, "from_": 0, "table": {}}
    wanted |= {"kind": "a", "maybe": None, "several": ("d", "d")}
    assert asdict(Config("a", maybe=None)) == wanted
    assert Config("a").table is not Config("a").table
    assert Config.__dataclass_fields__["table"].metadata["path"]
    assert Config("a", 10**9, 5e-324, 5, kind="b", maybe="c")


@pytest.mark.parametrize(("key", "value"), [("kind", "c"), ("kind", None), ("maybe", "a")])
def test_a_value_that_a_literal_does_not_have_is_a_problem(key: str, value: Any) -> None:
    with rejects(key, value, "unknown"):
        Config("a", **{key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("steps", 0), ("steps", 10**9 + 1), ("clip", 0.0), ("clip", -1.0), ("clip", math.nan)),
        ("from", 6),
    ],
)
def test_a_value_out_of_its_range_is_a_problem(key: str, value: float) -> None:
    with rejects(key, value, "range"):
        Config("a", **{"from_" if key == "from" else key: value})


def test_one_text_in_place_of_a_list_is_a_problem() -> None:
    with rejects("several", "d", "type"):
        Config("a", several="d")  # type: ignore[arg-type]


def test_all_problems_are_in_one_error() -> None:
    with rejects("steps", 0, "range") as caught:
        Config("bad", 0)
    assert [problem.key for problem in caught.value.problems] == ["steps", "name"]
