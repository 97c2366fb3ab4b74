"""The pool of ranks: right answers, reuse, and every way in which a rank can fail."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from forge_testing import RankError, rank_mesh, run_on_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.lane("test")]


@dataclass
class Point:
    x: int
    grown: torch.Tensor


def total() -> float:
    tensor = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(tensor)
    return tensor.item()


def grow(point: Point) -> Point:
    return Point(point.x + dist.get_rank(), point.grown + dist.get_world_size())


def pid() -> int:
    return os.getpid()


def groups_of(shape: tuple[int, int]) -> tuple[int, float, bool]:
    mesh = rank_mesh(shape, ("dp_replicate", "dp_shard"))
    tensor = torch.tensor(1.0)
    dist.all_reduce(tensor, group=mesh["dp_shard"].get_group())
    return os.getpid(), tensor.item(), mesh is rank_mesh(shape, ("dp_replicate", "dp_shard"))


def draw() -> float:
    return torch.rand(()).item()


def raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("the reason")
    dist.barrier()


def die_on(rank: int, number: int) -> None:
    if dist.get_rank() == rank:
        print("last words", flush=True)
        os.kill(os.getpid(), number)
    dist.barrier()


def leave_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)


def forget_the_collective_on(rank: int) -> None:
    if dist.get_rank() != rank:
        dist.barrier()


def return_something_unpicklable() -> object:
    return (x for x in ())


@pytest.mark.lane("quick")
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_rank_answers(world: int) -> None:
    assert run_on_ranks(world, total) == [sum(range(world))] * world


def test_arguments_and_results_may_be_classes_of_the_test_module() -> None:
    points = run_on_ranks(2, grow, Point(5, torch.zeros(3)))
    assert [point.x for point in points] == [5, 6]
    assert all(type(point) is Point and point.grown.tolist() == [2.0] * 3 for point in points)


def test_processes_meshes_and_seeds() -> None:
    first = run_on_ranks(4, groups_of, (2, 2))
    assert run_on_ranks(4, groups_of, (2, 2)) == first  # the same processes
    assert [row[1:] for row in first] == [(2.0, True)] * 4
    assert len({row[0] for row in first} | {os.getpid()}) == 5
    assert len({*run_on_ranks(4, draw), *run_on_ranks(4, draw)}) == 1


@pytest.mark.slow
def test_a_rank_that_raises() -> None:
    before = run_on_ranks(3, pid)
    with pytest.raises(RankError) as caught:
        run_on_ranks(3, raise_on, 1)
    assert str(caught.value).startswith("rank 1 of 3 ")
    assert "ValueError: the reason" in caught.value.reports[1]
    assert "raise_on" in caught.value.reports[0]  # it stood in the barrier, or failed in it
    after = run_on_ranks(3, pid)
    assert not {*before} & {*after}
    assert not any(running(process) for process in before)


def test_a_rank_that_dies() -> None:
    with pytest.raises(RankError) as caught:
        run_on_ranks(2, die_on, 1, signal.SIGKILL)
    assert "died by SIGKILL" in caught.value.reports[1]
    assert "last words" in caught.value.reports[1]
    with pytest.raises(RankError, match=r"rank 0: .*exit code 7"):
        run_on_ranks(2, leave_on, 0)
    assert run_on_ranks(2, total) == [1.0, 1.0]


@pytest.mark.slow
def test_a_hang_shows_the_stack_of_every_rank() -> None:
    run_on_ranks(2, total)
    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_on_ranks(2, forget_the_collective_on, 0, timeout=1.0)
    assert re.match("rank 1 of 2 .* 1 s", str(caught.value))
    assert "in barrier" in caught.value.reports[1]
    assert "in forget_the_collective_on" in caught.value.reports[1]
    assert caught.value.reports[0] == "returned"
    assert time.monotonic() - began < 10


def test_a_rank_that_died_between_two_calls() -> None:
    processes = run_on_ranks(2, pid)
    os.kill(processes[1], signal.SIGKILL)
    with pytest.raises(RankError, match="rank 1: died by SIGKILL"):
        run_on_ranks(2, total)
    assert run_on_ranks(2, total) == [1.0, 1.0]


def test_a_result_that_cannot_be_sent_is_that_ranks_failure() -> None:
    with pytest.raises(RankError, match="cannot pickle"):
        run_on_ranks(1, return_something_unpicklable)


def test_functions_that_no_rank_can_import_are_rejected() -> None:
    with pytest.raises(ValueError, match="<lambda>"):
        run_on_ranks(1, lambda: 0)
    with pytest.raises(ValueError, match="world 0 "):
        run_on_ranks(0, total)


SESSION = """
import sys, time
sys.path.insert(0, sys.argv[1])
from forge_testing import run_on_ranks
from victim import parent_and_self
print(*sum(run_on_ranks(2, parent_and_self), []), flush=True)
time.sleep(float(sys.argv[2]))
"""
VICTIM = """
import os

def parent_and_self():
    return [os.getppid(), os.getpid()]
"""


@pytest.mark.slow
@pytest.mark.cpu_only(
    reason="its ranks make nothing on a device, which a session of its own refuses"
)
@pytest.mark.parametrize("end", ["is killed", "exits"])
def test_no_process_outlives_the_session(tmp_path: Path, end: str) -> None:
    (tmp_path / "victim.py").write_text(VICTIM)
    seconds = "600" if end == "is killed" else "0"
    command = [sys.executable, "-c", SESSION, str(tmp_path), seconds]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        if end == "is killed":
            process.kill()
    assert len(pids) == 4
    deadline = time.monotonic() + 20
    while any(running(process) for process in pids) and time.monotonic() < deadline:
        time.sleep(0.01)  # polling processes
    assert not any(running(process) for process in pids)
    assert not list(tmp_path.glob("forge-ranks-*"))


def running(process: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
