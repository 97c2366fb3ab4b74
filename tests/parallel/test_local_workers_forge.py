"""Ranks that forge_resilience starts form the group that forge_parallel makes."""

from __future__ import annotations

import sys

import pytest

from forge_parallel import start
from forge_resilience import local_workers, run_local_workers
from forge_testing.processes import ALL_REDUCE

pytestmark = [pytest.mark.distributed, pytest.mark.lane("test")]


def test_both_name_the_same_variables() -> None:
    assert (local_workers.STORE_FD, local_workers.RUN_NAME) == (start.STORE_FD, start.RUN_NAME)


@pytest.mark.slow
def test_local_workers_form_a_group(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_local_workers([sys.executable, "-c", ALL_REDUCE], 2) == 0
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["environment 0/2 3.0", "environment 1/2 3.0"]
    assert "Traceback" not in err
