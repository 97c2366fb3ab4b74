"""Any number of readers divides any global batch, and what that costs is said."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from forge_parallel import ParallelConfig
from forge_parallel.compute import divide_batch
from forge_parallel.pipeline import schedule_problems
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

PLAIN = ParallelConfig()
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble",
             "dualpipev")  # fmt: skip


@pytest.mark.parametrize("global_batch", [1, 7, 16, 96, 256, 1000])
def test_F101_the_micro_batch_is_the_part_or_the_largest_that_costs_a_tenth(
    global_batch: int,
) -> None:
    """By trying every size, the obvious way."""
    for readers in range(1, 40):
        parts = divide_batch(PLAIN, global_batch, readers)
        assert global_batch % parts.size == 0
        assert parts.count == math.ceil(global_batch / parts.size / readers)
        if global_batch % readers == 0:
            assert (parts.size, parts.count, parts.cost) == (global_batch // readers, 1, None)
            continue
        share = math.ceil(global_batch / readers)
        sizes = [m for m in range(1, global_batch + 1) if global_batch % m == 0]
        rows = {m: m * math.ceil(global_batch / (m * readers)) for m in sizes}
        assert parts.size == max(m for m in sizes if rows[m] <= 1.1 * share)
        assert parts.filler == pytest.approx(rows[parts.size] * readers / global_batch - 1)


def test_F101_the_cost_of_padding_sequences_is_reported() -> None:
    parts = divide_batch(PLAIN, 16, 5)
    assert (parts.size, parts.count) == (4, 1)
    assert parts.cost is not None
    assert re.findall(r"[\d.]+%?", parts.cost) == ["5", "16", "4", "1", "25.0%"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_the_count_is_the_next_that_the_schedule_runs(schedule: str, pp: int) -> None:
    config = ParallelConfig(pp=pp, pp_schedule=schedule)
    for rows in range(1, 30):
        parts = divide_batch(config, rows, 1, micro_batch=1)
        allowed = [n for n in range(rows, 4 * rows + 9) if not schedule_problems(config, n, 64)]
        assert parts.count == allowed[0]


def test_a_pipeline_gets_micro_batches_without_a_setting() -> None:
    """Not one micro-batch of the whole share, which would wait behind one of filler."""
    parts = divide_batch(ParallelConfig(pp=4, pp_schedule="1f1b"), 64, 2)
    assert (parts.size, parts.count, parts.cost) == (8, 4, None)


@pytest.mark.parametrize(("rows", "readers"), [(0, 4), (16, 0)])
def test_no_rows_and_no_readers_are_rejected(rows: int, readers: int) -> None:
    with rejects(*(("global_batch", 0) if readers else ("readers", 0)), code="range"):
        divide_batch(PLAIN, rows, readers)


@pytest.mark.parametrize("size", [3, 0, 17])
def test_a_micro_batch_that_does_not_divide_is_rejected(size: Any) -> None:
    with rejects("micro_batch", size, "divides"):
        divide_batch(PLAIN, 16, 4, size)
