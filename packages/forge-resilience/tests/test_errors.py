"""Errors of ranks: what the others raise, and with which exit code."""

from __future__ import annotations

import json

import pytest

from forge_resilience import errors
from forge_resilience._shared.problems import Problem, WithProblems
from forge_resilience.errors import (
    JobError,
    as_config_error,
    config_errors,
    raise_reported,
    report_of,
)
from forge_testing.problems import assert_problem, rejects

pytestmark = pytest.mark.lane("test")

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, JobError)]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_one_rank_is_raised_by_all_as_what_it_was(kind: type[JobError]) -> None:
    sent = report_of(kind([Problem("a", "range", [1], "must be 2", "use 2", "job.toml")], "run"))
    assert json.loads(json.dumps(sent)) == sent
    with pytest.raises(JobError) as caught:
        raise_reported([None, sent, None])
    assert type(caught.value) is kind
    assert caught.value.exit_code == kind.exit_code
    (problem,) = caught.value.problems
    assert_problem(caught.value, "a", [1], "range")
    assert (problem.rank, problem.where, problem.origin) == (1, "run", "job.toml")
    assert (
        caught.value.lines == [str(problem)] == ["rank 1: run: a [1] must be 2; use 2 [job.toml]"]
    )
    again = report_of(caught.value)  # a report of a report
    assert again == sent


def test_each_kind_has_an_exit_code_of_its_own() -> None:
    assert len({kind.exit_code for kind in KINDS}) == len(KINDS) >= 6


def test_a_problem_of_several_ranks_is_raised_once() -> None:
    raise_reported([None, None])
    code = int(errors.DataError.exit_code)
    with pytest.raises(errors.DataError) as caught:
        raise_reported([[code, "a is 1", "b is 2"], [code, "a is 1"]])
    assert caught.value.lines == ["a is 1", "b is 2"]
    assert [(p.key, p.code, p.value) for p in caught.value.problems] == [("", "error", ...)] * 2


class Invalid(WithProblems, ValueError):
    """An error of a package."""


@pytest.mark.parametrize(("where", "origin"), [("optimizer", ""), ("runs/a.toml", "runs/a.toml")])
def test_an_error_of_a_package_keeps_its_problems(where: str, origin: str) -> None:
    """Below the table they have its key, and a file that the text names is their origin."""
    for table, key in (("", "lr"), ("optimizer", "optimizer.lr")):
        rejected = rejects(key, -1, "range", errors.ConfigError, where=origin)
        with rejected as caught, config_errors(table):
            raise Invalid([Problem("lr", "range", -1, "must be 0 or more")], where)
        assert caught.value.where == ("" if table else where)
        assert caught.value.problems[0].origin == (origin if table else "")


def test_a_file_of_an_error_is_named_by_the_error_that_replaces_it() -> None:
    damaged = WithProblems([Problem("image", "damaged", ..., "is torn")], "a.png")
    found = as_config_error(damaged)
    assert_problem(found, "image", ..., "damaged")
    assert all(line.startswith("a.png: ") for line in (*found.lines, str(found)))


def test_an_error_without_problems_has_the_key_of_the_table() -> None:
    for table in ("", "callbacks"):
        with rejects(table, ..., "error", errors.ConfigError, where="lab"), config_errors(table):
            raise ImportError("lab")


def test_a_text_is_a_problem_without_key() -> None:
    for given in ("a is 1", ["a is 1"]):
        with rejects("", ..., "error", errors.StateError):
            raise errors.StateError(given)
