"""The shared topic `problems`, by the copy of one package; `check` compares the bytes of the others."""

from __future__ import annotations

import pickle

import pytest

from forge_moe._shared.problems import (
    Problem,
    ProblemError,
    Shown,
    WithProblems,
    invalid,
    problems_of,
    raise_problems,
    show,
)

pytestmark = pytest.mark.lane("test")

LR = Problem("lr", "range", -1.0, "must exceed 0", "use 3e-4")
NAME = Problem("name", "unknown", "adm", "must be listed")


class Damaged(WithProblems, RuntimeError):
    """A kind of error of a package."""


def test_a_text_has_key_value_rule_and_fix_in_this_order() -> None:
    assert str(LR) == "lr -1.0 must exceed 0; use 3e-4"
    assert str(NAME) == "name 'adm' must be listed"
    assert str(Problem("", "damaged", "a.bin", "is damaged", "copy it")).startswith("'a.bin' is")


def test_a_table_comes_before_the_key() -> None:
    assert LR.under("optimizer").under("train").key == "train.optimizer.lr"
    assert Problem("", "type", 3, "needs a table").under("optimizer").key == "optimizer"
    assert (LR.under("a").code, LR.under("a").value) == (LR.code, LR.value)


def test_one_error_has_all_problems_and_survives_pickling() -> None:
    with pytest.raises(ValueError, match="lr") as caught:
        raise_problems("optimizer", iter([LR, NAME]))
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert problems_of(error) == (LR, NAME)
        assert (error.key, error.code) == ("lr", "range")
        assert str(error) == f"optimizer: {LR}\noptimizer: {NAME}"
    raise_problems("optimizer", [])


def test_other_kinds_of_errors_carry_problems_too() -> None:
    error = invalid("", "not_json", ..., "holds no JSON", where="a.json", kind=Damaged)
    assert (type(error), error.where, str(error)) == (Damaged, "a.json", "a.json: holds no JSON")
    ordinary = invalid("lr", "range", -1.0, "must exceed 0", "use 3e-4")
    assert (type(ordinary), ordinary.problems) == (ProblemError, (LR,))
    again = pickle.loads(pickle.dumps(Damaged("two\nlines")))
    assert (str(again), again.problems, again.code) == ("two\nlines", (), "")


def test_an_error_without_problems_is_one_for_each_line() -> None:
    first, second = problems_of(ValueError("lr -1\nbeta 2"))
    assert (str(first), str(second)) == ("lr -1", "beta 2")
    assert (first.key, first.code, first.value) == ("", "error", ...)


def test_a_value_of_another_process_is_shown_as_it_was_there() -> None:
    sent = Problem("name", "unknown", Shown("'adm'"), "is unknown", origin="job.toml")
    assert str(sent) == "name 'adm' is unknown [job.toml]"


def test_values_are_shown_in_part() -> None:
    assert show("a" * 1000) == "'" + "a" * 199 + "..."
    assert len(show(10**10000)) < 60
