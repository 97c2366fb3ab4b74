"""Errors of ranks: what the others raise, and with which exit code."""

from __future__ import annotations

import pytest

from forge_train import errors
from forge_train.errors import JobError, raise_reported

pytestmark = pytest.mark.lane("test")

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, JobError)]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_one_rank_is_raised_by_all_as_what_it_was(kind: type[JobError]) -> None:
    with pytest.raises(JobError) as caught:
        raise_reported([None, [int(kind.exit_code), "a is 1"], None])
    assert type(caught.value) is kind
    assert caught.value.exit_code == kind.exit_code
    (problem,) = caught.value.problems
    assert "a is 1" in problem


def test_each_kind_has_an_exit_code_of_its_own() -> None:
    assert len({kind.exit_code for kind in KINDS}) == len(KINDS) >= 6


def test_a_problem_of_several_ranks_is_said_once() -> None:
    raise_reported([None, None])
    code = int(errors.DataError.exit_code)
    with pytest.raises(errors.DataError) as caught:
        raise_reported([[code, "a is 1", "b is 2"], [code, "a is 1"]])
    assert caught.value.problems == ("a is 1", "b is 2")
