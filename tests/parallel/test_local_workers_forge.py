"""Ranks that forge_resilience starts form the group that forge_parallel makes."""

from __future__ import annotations

import sys

import pytest

from forge_parallel import start
from forge_resilience import local_workers, run_local_workers

pytestmark = [pytest.mark.distributed, pytest.mark.lane("test")]

_GLOO = """
import sys
import torch
import torch.distributed as dist
from forge_parallel.start import end_process_group, find_world, leave, start_process_group
world = find_world()
start_process_group(world, "cpu", start_timeout_seconds=60)
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
sys.stdout.write(f"{world.launcher} {world.rank}/{world.world_size} {total.item()}\\n")
end_process_group()
leave(0)
"""


def test_both_name_the_same_variables() -> None:
    assert (local_workers.STORE_FD, local_workers.RUN_NAME) == (start.STORE_FD, start.RUN_NAME)


@pytest.mark.slow
def test_local_workers_form_a_group(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_local_workers([sys.executable, "-c", _GLOO], 2) == 0
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["environment 0/2 3.0", "environment 1/2 3.0"]
    assert "Traceback" not in err
