"""One random stream for each rank: back bit by bit on the same ranks, new and different on others."""

import random

import pytest
import torch
import torch.distributed as dist

from forge_ckpt import RNGState, Store
from forge_ckpt.rng import seed_process
from forge_testing import run_on_ranks

pytestmark = pytest.mark.lane("test")

# Two streams are taken as different when 4 draws of 2**31 values differ: never by chance.


def draw():
    return [random.getrandbits(31), *torch.randint(0, 2**31, (3,)).tolist()]


def save(root):
    torch.manual_seed(100 + dist.get_rank())
    random.seed(dist.get_rank())
    draw()
    with Store(root) as store:
        store.save(1, {"w": torch.zeros(3), "rng": RNGState()})
        return draw(), store.inspect(1)


def load(root):
    torch.manual_seed(0)
    random.seed(0)
    with Store(root) as store:
        assert store.load({"rng": RNGState()}) == 1
    return draw()


@pytest.mark.lane("quick")
@pytest.mark.distributed
def test_F56_every_rank_gets_its_own_stream_back(tmp_path):
    saved = run_on_ranks(4, save, str(tmp_path))
    drawn = [numbers for numbers, _ in saved]
    assert run_on_ranks(4, load, str(tmp_path)) == drawn
    assert len({tuple(numbers) for numbers in drawn}) == 4
    names = {f"rng.streams.{rank}.torch" for rank in range(4)} | {"w"}
    assert set(saved[0][1]["tensors"]) == names, "one stream of each rank, named by it"


@pytest.mark.distributed
def test_F56_other_numbers_of_ranks_get_new_streams_all_different_and_the_same_each_time(tmp_path):
    seen = [tuple(numbers) for numbers, _ in run_on_ranks(4, save, str(tmp_path))]
    for world in (1, 2, 3):
        first = run_on_ranks(world, load, str(tmp_path))
        assert run_on_ranks(world, load, str(tmp_path)) == first
        seen += map(tuple, first)
    assert len(set(seen)) == 4 + 1 + 2 + 3


def one_stream(root):
    with Store(root) as store:
        store.save(1, {"rng": RNGState()})
    return draw()


@pytest.mark.distributed
def test_F56_one_process_to_many(tmp_path):
    want = one_stream(tmp_path)
    assert load(tmp_path) == want
    found = run_on_ranks(3, load, str(tmp_path))
    assert len({tuple(numbers) for numbers in [*found, want]}) == 4


class Unversioned:
    """The layout that 0.1.0 saved: the stream itself, without ranks."""

    def state_dict(self):
        return {
            "python": random.getstate(),
            "torch": torch.get_rng_state(),
            "cuda": None,
            "numpy": None,
        }

    def load_state_dict(self, state):
        raise AssertionError


@pytest.mark.distributed
def test_the_layout_of_0_1_still_loads(tmp_path):
    with Store(tmp_path) as store:
        store.save(1, {"rng": Unversioned()})
    want = draw()
    assert load(tmp_path) == want
    found = run_on_ranks(2, load, str(tmp_path))
    assert len({tuple(numbers) for numbers in [*found, want]}) == 3


def in_halves(root):
    """Ranks 0-1 and 2-3 have a store each, with ranks 0 and 1 of its own."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = dist.get_rank() // 2
    group = halves[half]
    torch.manual_seed(dist.get_rank())
    with Store(f"{root}/{half}", group=group) as store:
        store.save(1, {"rng": RNGState(group)})
        want = draw()
        torch.manual_seed(77)
        assert store.load({"rng": RNGState(group)}) == 1
        return draw() == want, sorted(store.inspect(1)["tensors"])


@pytest.mark.distributed
def test_streams_are_those_of_the_group(tmp_path):
    names = ["rng.streams.0.torch", "rng.streams.1.torch"]
    assert run_on_ranks(4, in_halves, str(tmp_path)) == [(True, names)] * 4


def pairs(root, step):
    """Neighbours draw alike; step 0 saves."""
    torch.manual_seed(dist.get_rank() // 2)
    random.seed(dist.get_rank() // 2)
    with Store(root) as store:
        if step == 0:
            store.save(1, {"rng": RNGState(alike=2)})
        else:
            store.load({"rng": RNGState(alike=2)})
    return draw()


@pytest.mark.distributed
def test_ranks_that_draw_alike_share_a_stream_whatever_saved_it(tmp_path):
    saved = run_on_ranks(4, pairs, str(tmp_path), 0)
    assert saved[0] == saved[1] != saved[2] == saved[3]
    assert run_on_ranks(4, pairs, str(tmp_path), 1) == saved
    two = run_on_ranks(2, pairs, str(tmp_path), 1)
    assert two[0] == two[1] not in saved
    run_on_ranks(2, save, str(tmp_path / "other"))
    back = run_on_ranks(4, pairs, str(tmp_path / "other"), 1)
    assert back[0] == back[1] != back[2] == back[3]


def test_numpy_continues_too(tmp_path):
    numpy = pytest.importorskip("numpy")
    with Store(tmp_path) as store:
        store.save(1, {"rng": RNGState()})
        want = numpy.random.random(3)
        store.load({"rng": RNGState()})
    assert (numpy.random.random(3) == want).all()


@pytest.mark.parametrize("changed", ["python", "torch"])
def test_new_streams_depend_on_each_generator_that_was_saved(changed):
    drawn = []
    for seed in (1, 2):
        random.seed(seed if changed == "python" else 0)
        torch.manual_seed(seed if changed == "torch" else 0)
        saved = {**RNGState().state_dict(), "world_size": 2}  # of two ranks, and here is one
        RNGState().load_state_dict(saved)
        drawn.append(draw())
    assert all(first != second for first, second in zip(*drawn, strict=True))


def test_a_process_is_seeded_by_seed_and_stream():
    drawn = []
    for seed, stream in ((1, 0), (1, 1), (2, 0), (1, 0)):
        seed_process(seed, stream)
        drawn.append(draw())
    assert drawn[0] == drawn[3]
    assert len({str(values) for values in drawn}) == 3
