"""F118: plans against the peaks of torch's caching allocator, which docs/data/null-gpu-memory.json keeps.

The peaks were measured on a GPU that computes nothing (`hatch run null-gpu memory --write`); plans need none.
"""

from __future__ import annotations

import pytest
from tests.null_gpu.memory import is_near, plan, rises, rows
from tests.null_gpu.memory_rows import JOBS, PRESETS, Job

pytestmark = pytest.mark.lane("test")

KEPT = rows()


def test_F118_every_preset_of_one_gpu_is_measured() -> None:
    assert PRESETS
    assert {job.name for job in PRESETS} <= KEPT.keys()


def test_a_peak_rises_from_2_percent_on() -> None:
    assert [rises(peak, 1000) for peak in (900, 1000, 1020, 1021)] == [False, False, False, True]


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.parametrize("job", [j for j in JOBS if j.name in KEPT], ids=lambda job: job.name)
def test_F118_a_plan_is_near_the_allocators_peak(job: Job) -> None:
    """On one GPU within 5 %, in a layout within 10 %; and at most 2 % below."""
    share = plan(job) / KEPT[job.name]["peak"]
    assert is_near(share, job), f"{share:.3f}"
