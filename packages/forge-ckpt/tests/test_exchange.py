"""Communication between ranks: how often, in which form, through which group."""

import os
import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import forge_ckpt.rank_group
from forge_ckpt import ForgeSavePlanner, RNGState, Store
from forge_ckpt.rank_group import RankGroup
from forge_testing import run_on_ranks
from forge_testing.problems import assert_problem

pytestmark = [pytest.mark.distributed, pytest.mark.lane("test")]

_ALLOWED = ("all_gather", "gather", "broadcast")
_FORBIDDEN = (
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "all_reduce",
    "barrier",
)


def counted(root):
    """Collectives and their bytes in a save (no retention yet) and in a load; pickling is an error."""
    calls: list[tuple[str, int]] = []
    originals = {name: getattr(dist, name) for name in _ALLOWED + _FORBIDDEN} | {
        "dumps": pickle.dumps
    }

    def count(name):
        def call(*args, **kwargs):
            tensors = [a for a in args if isinstance(a, torch.Tensor)]
            calls.append((name, tensors[-1].numel() * tensors[-1].element_size()))
            return originals[name](*args, **kwargs)

        return call

    def refuse(*args, **kwargs):
        raise AssertionError("an object was pickled, or another collective used")

    state = {"w": torch.ones(1000, 1000), "n": {"cursor": 5}, "rng": RNGState()}
    with Store(root) as store:
        try:
            for name in _ALLOWED:
                setattr(dist, name, count(name))
            for name in _FORBIDDEN:
                setattr(dist, name, refuse)
            pickle.dumps = refuse
            store.save(1, state)
            saved, calls[:] = list(calls), []
            store.save(2, state)
            again, calls[:] = list(calls), []
            store.load(state)
            return saved, again, list(calls)
        finally:
            pickle.dumps = originals.pop("dumps")
            for name, real in originals.items():
                setattr(dist, name, real)


@pytest.mark.slow
def test_collectives_of_a_save_and_of_a_load(tmp_path):
    for saved, again, loaded in run_on_ranks(2, counted, str(tmp_path)):
        assert _tally(saved) == {"all_gather": 4, "gather": 4, "broadcast": 10}
        assert _tally(again) == {"all_gather": 3, "gather": 3, "broadcast": 8}, "not planned again"
        assert _tally(loaded) == {"all_gather": 4, "broadcast": 4}
        # the state has 4 MB: its plan, digests and manifest travel, its tensors do not
        assert sum(size for _, size in saved + loaded) < 100_000


def with_other_structures(root):
    """Steps whose states differ in one thing from the one before; each must come back as it was saved."""
    full, rank = torch.arange(24.0).view(4, 6), dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))

    def spread(dim):
        return distribute_tensor(full.clone(), mesh, [Shard(dim)])

    states = [
        {"w": spread(0), "b": full.clone(), "n": 1},
        {"w": spread(0), "b": full.clone() + 1, "n": 2},  # nothing
        {"w": spread(1), "b": full.clone(), "n": 3},  # a placement
        {"w": spread(1), "b": full.clone().double(), "n": 4},  # a dtype
        {"w": spread(1), "b": full[:3].clone().double(), "n": 5},  # a shape
        {"w": spread(1), "b": full.clone(), "c": full + 7, "n": 6},  # a name
        {"w": spread(1), "b": full, "c": full, "n": 7},  # a tie
        {"w": spread(1), "b": full.clone(), "c": full.clone() + 1, "n": 8},  # no tie any more
        {"w": spread(1), "b": full.clone(), "c": full.clone() + 1, "n": 9},  # of one rank, below
    ]
    planned = []
    real = ForgeSavePlanner.propose
    ForgeSavePlanner.propose = lambda planner: (planned.append(1), real(planner))[1]
    found = []
    try:
        with Store(root, keep_last=1) as store:
            for step, state in enumerate(states):
                planned.clear()
                own = {"y": full * 2} if rank and step == len(states) - 1 else {}
                store.save(step, {"x": state, **own}, wait=step % 2 == 0)
                back = {k: v * 0 if isinstance(v, torch.Tensor) else 0 for k, v in state.items()}
                into = {"x": back}
                store.load(into)
                whole = [
                    torch.equal(*(t.full_tensor() if isinstance(t, DTensor) else t for t in pair))
                    for pair in ((into["x"][k], v) for k, v in state.items() if k != "n")
                ]
                found.append((len(planned), all(whole), into["x"]["n"]))
    finally:
        ForgeSavePlanner.propose = real
    return found


def test_a_state_of_another_structure_is_planned_again(tmp_path):
    planned = [1, 0, 1, 1, 1, 1, 1, 1, 1]
    wanted = [(count, True, n) for n, count in enumerate(planned, start=1)]
    assert run_on_ranks(2, with_other_structures, str(tmp_path)) == [wanted, wanted]


def in_groups_of_their_own(root):
    if (
        dist.get_rank() == 1
    ):  # torch names a group of some ranks by how many groups each of them is in
        dist.new_group([1], use_local_synchronization=True)
    state = {"w": torch.full((3,), float(dist.get_rank()))}
    with Store(root) as store:
        store.save(1, {f"rank{dist.get_rank()}": state}, wait=False)


def test_a_save_in_the_background_of_ranks_that_are_in_unlike_groups(tmp_path):
    run_on_ranks(2, in_groups_of_their_own, str(tmp_path), timeout=30)
    with Store(tmp_path) as store:
        assert store.steps() == [1]


def _tally(calls):
    names = [name for name, _ in calls]
    return {name: names.count(name) for name in set(names)}


def errors():
    group = RankGroup()
    results = []
    for run in (
        lambda: group.run_on_all_ranks(lambda: int("x")),
        lambda: group.run_on_all_ranks(lambda: 1 // (group.rank != 1)),
        lambda: group.run_on_rank_0(lambda: 1 // 0),
        lambda: group.map_reduce(lambda: group.rank, lambda found: found),
        lambda: group.map_reduce(lambda: os.stat(f"/none/{group.rank}"), lambda found: found),
        lambda: group.map_reduce(lambda: 1, lambda found: int("y")),
    ):
        try:
            results.append(run())
        except Exception as error:
            results.append((type(error).__name__, str(error)))
    return results


def test_all_ranks_succeed_or_all_raise():
    results = run_on_ranks(3, errors)
    alike = "invalid literal for int() with base 10: 'x'"
    missing = "[Errno 2] ranks 0, 1, 2: No such file or directory: /none/0"
    for rank, found in enumerate(results):
        assert found[0] == ("ValueError", alike), "the same everywhere, without a rank"
        assert found[1][0] == ("ZeroDivisionError" if rank == 1 else "RuntimeError")
        assert found[2][0] == ("ZeroDivisionError" if rank == 0 else "RuntimeError")
        assert found[3] == [0, 1, 2]
        assert found[4] == ("FileNotFoundError", missing)
        assert found[5] == ("ValueError", "invalid literal for int() with base 10: 'y'")
    assert results[2][1][1].startswith("rank 1: ZeroDivisionError: ")


def interrupted():
    group = RankGroup()

    def run():
        if group.rank == 1:
            raise KeyboardInterrupt
        return 1

    try:
        group.run_on_all_ranks(run)
    except BaseException as error:
        return type(error).__name__


def test_an_interrupt_raises_on_the_other_ranks():
    assert run_on_ranks(2, interrupted) == ["RuntimeError", "KeyboardInterrupt"]


def groups(root):
    real = dist.get_backend_config
    found = []
    made = dist.new_group([0, 1])
    outside = dist.new_group([0])
    dist.get_backend_config = lambda group=None: "cuda:nccl"
    try:
        found.append(RankGroup().run_on_rank_0(lambda: 5))  # a gloo group was made
        try:
            RankGroup(made)
        except ValueError as error:
            found.append(error)
    finally:
        dist.get_backend_config = real
    try:
        found.append((RankGroup(outside).rank, RankGroup(outside).size))
    except ValueError as error:
        found.append(error)
    return found


def test_the_group_carries_cpu_tensors(tmp_path):
    first, second = run_on_ranks(2, groups, str(tmp_path))
    assert first[0] == second[0] == 5
    assert_problem(first[1], "group", "cuda:nccl", "backend")
    assert first[2] == (0, 1)
    assert_problem(second[2], "group", ..., "member")


def test_a_mixed_default_group_serves(monkeypatch):
    """The default group of a CUDA job: gloo for tensors of the host, NCCL for those of the device."""
    monkeypatch.setattr(
        forge_ckpt.rank_group,
        "dist",
        SimpleNamespace(
            is_available=lambda: True,
            is_initialized=lambda: True,
            get_rank=lambda group: 3,
            get_world_size=lambda group: 8,
            get_backend_config=lambda group: "cpu:gloo,cuda:nccl",
            group=SimpleNamespace(WORLD="world"),
        ),
    )
    assert forge_ckpt.rank_group._host_group(None) == "world"
