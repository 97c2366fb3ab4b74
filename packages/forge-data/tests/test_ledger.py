"""Windows of instances that are left out: the stream goes on behind them, whoever reads it."""

import json

import numpy as np
import pytest

from forge_data import BuiltinCorpus, Loader, PackedStream
from forge_data.config import DataConfig, TrainingSourceConfig
from forge_data.ledger import Ledger
from forge_data.phase_schedule import PhaseSchedule
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")


@pytest.fixture(scope="module")
def stream():
    return PackedStream(BuiltinCorpus("validation"), seq_len=64, seed=3)


def ids(loader, steps):
    return [i for _ in range(steps) for i in next(loader).instance_ids.tolist()]


@pytest.mark.parametrize(
    "windows", [[], [(0, 3)], [(8, 11)], [(5, 5), (6, 9), (20, 40)], [(30, 31), (2, 9), (4, 12)]]
)
def test_positions_are_those_of_a_list_without_the_windows(windows):
    left_out = {i for first, last in windows for i in range(first, last + 1)}
    rest = [i for i in range(200) if i not in left_out]
    ledger = Ledger(windows)
    assert ledger.ids(np.arange(100)).tolist() == rest[:100]
    assert ledger.ids([7]).tolist() == [rest[7]]
    assert {i for first, last in ledger.windows for i in range(first, last + 1)} == left_out


def test_a_window_of_10_to_the_15_costs_nothing():
    ledger = Ledger()
    ledger.add(10, 10**15)
    assert ledger.ids([9, 10]).tolist() == [9, 10**15 + 1]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_goes_on_after_the_window_and_after_a_resume(stream, num_workers):
    loader = Loader(stream, 4, num_workers=num_workers)
    assert ids(loader, 2) == list(range(8))
    loader.skip(9, 13)
    assert ids(loader, 2) == [8, *range(14, 21)]
    assert loader.cursor == 16
    state = json.loads(json.dumps(loader.state_dict()))
    loader.skip(21, 21)
    loader.close()
    resumed = Loader(stream, 4)
    resumed.load_state_dict(state)
    assert resumed.skipped == [(9, 13)]
    assert ids(resumed, 1) == [21, 22, 23, 24]


def test_a_loader_without_the_window_has_the_same_batches_and_digests(stream):
    late, early = Loader(stream, 4), Loader(stream, 4)
    early.skip(12, 15)
    assert [next(late).digest for _ in range(3)] == [next(early).digest for _ in range(3)]
    late.skip(12, 15)
    assert [next(late).digest for _ in range(3)] == [next(early).digest for _ in range(3)]
    assert late.state_dict() == early.state_dict()


def test_the_window_does_not_depend_on_the_number_of_ranks(stream):
    ranks = [Loader(stream, 8, rank=r, world_size=3) for r in range(3)]
    for rank in ranks:
        rank.skip(2, 4)
    seen = [i for rank in ranks for i in next(rank).instance_ids.tolist() if i >= 0]
    assert seen == [0, 1, *range(5, 11)]


@pytest.mark.parametrize("window", [(5, 3), (-5, 3), (1.5, 3), ("a", 3), (0, 2**62)])
def test_invalid_windows_are_rejected(window):
    with rejects("window", window, "range"):
        Ledger([window])


def test_what_was_handed_out_cannot_be_skipped(stream):
    loader = Loader(stream, 4)
    next(loader)
    with rejects("window", (2, 9), "order"):
        loader.skip(2, 9)
    loader.skip(4, 9)
    with rejects("window", (9, 12), "order"):
        loader.skip(9, 12)
    with rejects("window", (12, 11), "range"):
        loader.skip(12, 11)
    assert loader.skipped == [(4, 9)]


@pytest.mark.parametrize(
    ("skipped", "value", "code"),
    [
        (None, None, "type"),
        ([3], 3, "range"),
        ([[3]], [3], "range"),
        ([[5, 4]], [5, 4], "range"),
        ([[True, 4]], [True, 4], "range"),
        ([[1, 2], [2, 4]], [[1, 2], [2, 4]], "order"),
        ([[8, 9], [1, 2]], [[8, 9], [1, 2]], "order"),
    ],
)
def test_windows_that_no_loader_saved_are_rejected(stream, skipped, value, code):
    loader = Loader(stream, 4)
    loader.skip(4, 6)
    next(loader)
    with rejects("skipped", value, code, where="loader state: "):
        Loader(stream, 4).load_state_dict({**loader.state_dict(), "skipped": skipped})


def test_a_state_whose_window_was_edited_does_not_end_its_digest_chain(stream):
    loader = Loader(stream, 4)
    loader.skip(2, 6)
    next(loader)
    with rejects("cursor", 4, "mismatch"):
        Loader(stream, 4).load_state_dict({**loader.state_dict(), "skipped": [[2, 7]]})


def test_only_what_is_still_to_come_of_a_window_is_skipped(stream):
    loader = Loader(stream, global_batch=4)
    ids(loader, 2)
    loader.skip_rest([(0, 3), (6, 9), (12, 12)])
    assert loader.skipped == [(8, 9), (12, 12)]
    assert ids(loader, 1) == [10, 11, 13, 14]
    data = DataConfig(64, sources={"text": TrainingSourceConfig()})
    schedule = PhaseSchedule(data, 4)
    tokens = 64 * 12  # of the three steps
    assert schedule.instances_back(loader, tokens, 2, 0) == (4, 14)
    assert schedule.instances_back(loader, tokens, 2, 1) == (4, 7)
