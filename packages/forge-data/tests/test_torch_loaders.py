"""A Loader in torch's DataLoader, in StatefulDataLoader and in accelerate: the order and the state of a plain one."""

import copy
import gc
import importlib.util
import json
import pickle
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from forge_data import Batch, BuiltinCorpus, Loader, PackedStream, torch_workers
from forge_data.batch import Ragged
from forge_data.torch_workers import TorchWorkers
from forge_testing.problems import assert_problem, rejects

pytestmark = pytest.mark.lane("test")
STREAM = PackedStream(BuiltinCorpus("validation"), seq_len=32, seed=3)


def needs(name):
    missing = importlib.util.find_spec(name) is None
    return pytest.mark.skipif(missing, reason=f"needs {name}")


def make(state=None, **options):
    loader = Loader(STREAM, 4, **options)
    if state is not None:
        loader.load_state_dict(json.loads(json.dumps(state)))
    return loader


def torchs(loader, num_workers, **options):
    return DataLoader(loader, batch_size=None, num_workers=num_workers, **options)


def plain(steps):
    """(ids of each batch, state after each) without a DataLoader."""
    loader = make()
    return [(next(loader).instance_ids.tolist(), loader.state_dict()) for _ in range(steps)]


def ids_of(batches, steps):
    return [batch.instance_ids.tolist() for _, batch in zip(range(steps), batches)]


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_order_and_state_of_a_DataLoader_are_those_without_one(num_workers):
    expected = plain(9)
    loader = make()
    for (ids, state), batch in zip(expected[:4], torchs(loader, num_workers)):
        assert batch.instance_ids.tolist() == ids
        assert loader.state_dict(after=batch) == state
    assert loader.state_dict(after=2) == expected[1][1]
    assert loader.state_dict(after=0) == make().state_dict()

    resumed = make(loader.state_dict(after=batch))
    found = ids_of(torchs(resumed, num_workers), 5)
    assert found == [ids for ids, _ in expected[4:]]
    assert resumed.state_dict(after=5) == expected[8][1]


class Wrapped(IterableDataset):
    """What a user writes around a loader: `next` in a loop."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        return iter(partial(next, self.loader), None)


def test_F156_workers_of_torch_do_not_repeat_batches():
    """Also inside of a dataset of the user's own, and from any position on."""
    expected = [ids for ids, _ in plain(5)]
    assert ids_of(torchs(Wrapped(make()), 2), 5) == expected
    loader = make()
    next(loader)  # it goes on from here
    assert ids_of(torchs(loader, 2), 4) == expected[1:]


@pytest.mark.slow
def test_spawned_workers_read_steps_of_their_own():
    loader = make()
    batches = iter(torchs(loader, 2, multiprocessing_context="spawn"))
    assert ids_of(batches, 3) == [ids for ids, _ in plain(3)]
    with rejects("loader", ..., "workers"):
        loader.state_dict()
    with rejects("state", ..., "workers"):
        loader.load_state_dict(loader.state_dict(after=3))
    del batches
    loader.load_state_dict(loader.state_dict(after=3))
    assert loader.state_dict() == plain(3)[2][1]


def test_spawned_workers_of_a_second_iterator_differ_from_those_of_the_first(monkeypatch):
    started = SimpleNamespace(pid=1, poll=lambda: None)
    owner = TorchWorkers()
    with monkeypatch.context() as spawning:
        spawning.setattr(torch_workers, "get_spawning_popen", lambda: started)
        copies = [pickle.loads(pickle.dumps(owner)) for _ in range(4)]
    for number, copied in enumerate(copies):
        worker = SimpleNamespace(id=number % 2, num_workers=2)
        monkeypatch.setattr(torch_workers, "get_worker_info", lambda worker=worker: worker)
        copied.claim(loaded=True)
        if number < 2:
            copied.claim(loaded=False)
        else:
            with rejects("loader", ..., "second"):
                copied.claim(loaded=False)


def test_a_state_that_cannot_be_exact_is_rejected():
    loader = make()
    assert loader.state_dict() == make().state_dict()
    batches = iter(torchs(loader, 2))
    batch = next(batches)
    for use in (
        loader.state_dict,
        partial(next, loader),
        partial(loader.skip, 90, 91),
        partial(loader.rebatch, 2, 1),
    ):
        with rejects("loader", ..., "workers"):
            use()
    with rejects("state", ..., "workers"):
        loader.load_state_dict(loader.state_dict(after=batch))
    with rejects("after", -1, "range"):
        loader.state_dict(after=-1)
    with rejects("after", ..., "filler"):
        loader.state_dict(after=loader.filler(2))
    other = next(Loader(PackedStream(BuiltinCorpus("validation"), 32, seed=3), 3))
    with rejects("after", other.digest, "unknown"):
        loader.state_dict(after=other)


@pytest.mark.lane("quick")
def test_a_state_that_is_loaded_while_workers_begin_applies_or_raises():
    """The next batch is the state's, or an error; never a batch of the old order."""
    state = plain(5)[4][1]
    loader = make()
    batches = iter(torchs(loader, 2))
    try:
        loader.load_state_dict(state)
    except ValueError as error:
        assert_problem(error, "state", ..., "workers")
    else:
        with pytest.raises(ValueError, match=r"iter\(\)"):
            next(batches)
    del batches
    loader.load_state_dict(state)
    assert ids_of(torchs(loader, 2), 1) == [plain(6)[5][0]]


@pytest.mark.lane("quick")
def test_a_second_iterator_with_workers_repeats_nothing():
    loader = make()
    assert len(ids_of(torchs(loader, 2), 3)) == 3
    with pytest.raises(ValueError, match="state_dict"):
        ids_of(torchs(loader, 2), 1)
    loader.load_state_dict(loader.state_dict(after=3))
    assert ids_of(torchs(loader, 2), 2) == [ids for ids, _ in plain(5)[3:]]

    kept = torchs(make(), 2, persistent_workers=True)
    ids_of(kept, 3)
    with pytest.raises(ValueError, match="persistent_workers"):
        ids_of(kept, 1)


@pytest.mark.lane("quick")
@pytest.mark.parametrize("own", [{"num_workers": 2}, {"prefetch": 2}])
def test_workers_of_the_loader_and_of_torch_are_not_nested(own):
    loader = make(**own)
    expected = [ids for ids, _ in plain(4)]
    assert ids_of(torchs(loader, 0), 2) == expected[:2]
    with pytest.raises(ValueError, match="prefetch"):
        ids_of(torchs(loader, 2), 1)
    gc.collect()
    loader = make(loader.state_dict(after=2), **own)
    assert ids_of(loader, 2) == expected[2:], "its own workers are alive"
    loader.close()


class Shards:
    """A sharded stream of two shards."""

    num_shards = 2

    def arrays(self, ids):
        zeros = torch.zeros(len(ids), 2, dtype=torch.int64)
        names = ("tokens", "labels", "positions", "document_ids")
        return {
            **dict.fromkeys(names, zeros),
            "shard_places": torch.zeros(len(ids), 3, dtype=torch.int64),
        }

    def shards_of(self, ids):
        return ids % 2

    def load_places(self, table):
        pass

    def fingerprint(self):
        return {}


def test_a_sharded_stream_has_one_worker_of_torch_at_most():
    assert ids_of(torchs(Loader(Shards(), 2), 1), 2) == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="shards"):
        next(iter(torchs(Loader(Shards(), 2), 2)))
    with rejects("after", ..., "sharded"):
        Loader(Shards(), 2).state_dict(after=0)


def test_a_copy_of_a_loader_has_no_workers():
    loader = make()
    ids_of(torchs(loader, 2), 1)
    other = copy.deepcopy(loader)
    assert ids_of(other, 1) == [plain(1)[0][0]]


@needs("torchdata")
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("steps", [0, 1, 3, 4])
def test_StatefulDataLoader_goes_on_after_the_batches_that_were_used(num_workers, steps):
    from torchdata.stateful_dataloader import StatefulDataLoader

    def stateful():
        return StatefulDataLoader(make(), batch_size=None, num_workers=num_workers)

    expected = [ids for ids, _ in plain(steps + 3)]
    first, second = stateful(), stateful()
    assert ids_of(first, steps) == expected[:steps]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert ids_of(second, 3) == expected[steps:]


@needs("torchdata")
def test_the_state_of_a_worker_is_loaded_by_that_worker():
    from torchdata.stateful_dataloader import StatefulDataLoader

    batches = StatefulDataLoader(make(), batch_size=None, num_workers=2)
    ids_of(batches, 2)
    snapshots = batches.state_dict()["_snapshot"]["_worker_snapshots"]
    state = snapshots["worker_1"]["fetcher_state"]["dataset_iter_state"]
    with rejects("worker", [1, 2, 1], "mismatch", where="loader state: "):
        make(state)


@needs("accelerate")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_accelerate_reads_one_batch_more_and_the_state_does_not(num_workers):
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    expected = plain(5)
    loader = make()
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=False)
    )
    batches = accelerator.prepare(torchs(loader, num_workers))
    for (ids, state), batch in zip(expected, batches):
        assert isinstance(batch, Batch)
        assert batch.instance_ids.tolist() == ids
        assert loader.state_dict(after=batch) == state


@needs("lightning")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_Fabric_gives_the_batches_of_the_loader(num_workers):
    from lightning.fabric import Fabric

    expected = plain(4)
    loader = make()
    batches = Fabric(accelerator="cpu").setup_dataloaders(torchs(loader, num_workers))
    for (ids, state), batch in zip(expected, batches):
        assert batch.instance_ids.tolist() == ids
        assert loader.state_dict(after=batch) == state


def test_pin_memory_of_a_batch_pins_every_tensor(monkeypatch):
    pinned = []
    monkeypatch.setattr(
        torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self.clone()
    )
    batch = next(make())
    batch = Batch(batch.tokens, batch.labels, batch.positions, batch.document_ids, batch.instance_ids, batch.digest,
                  extras={"many": Ragged(torch.arange(3.0), torch.tensor([0, 1, 1, 2, 3]))})  # fmt: skip
    other = batch.pin_memory()
    assert len(pinned) == 6
    assert torch.equal(other.tokens, batch.tokens)
    assert torch.equal(other.extras["many"].values, torch.arange(3.0))
    assert (other.digest, other.label_weight) == (batch.digest, batch.label_weight)
