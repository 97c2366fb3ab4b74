"""Pipelines on real ranks: every schedule computes what one process computes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from pipeline_nets import error, one_process, train

from forge_testing import run_on_ranks

pytestmark = pytest.mark.distributed

SCHEDULES = (
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "interleaved_zero_bubble",
    "zbv_zero_bubble",
    "dualpipev",
)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_ranks_compute_what_one_process_computes(schedule: str) -> None:
    ranks = run_on_ranks(2, train, {"pp": 2, "pp_schedule": schedule}, {}, 4)
    assert error(ranks, one_process(4)) <= 1e-5
    for rank in ranks:
        assert rank["forwards"] == [[4] * len(rank["forwards"][0])] * 2
        assert rank["sharded"]
        assert not any(rank["modes"])
        assert (float(rank["own"]) != 0.0) == rank["has_last"]
