"""A mixed stream gives the rows of its streams, on any number of readers."""

from __future__ import annotations

import contextlib
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from memory_sources import begin_life, end_life, next_rows, skip

from forge_data import BuiltinCorpus, Loader, PackedStream, Ragged
from forge_data.collate import as_ragged
from forge_data.mixed_stream import MixedStream, seed_of
from forge_data.mixture import Phase
from forge_data.phased_stream import PhasedStream
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")


class Numbers:
    """Row i of a source is i and its letter."""

    def __init__(self, letter, length=10, width=2, extra=None):
        self.letter, self.length, self.width, self.extra = letter, length, width, extra

    def __len__(self):
        return self.length

    def arrays(self, ids):
        rows = np.repeat(np.asarray(ids, np.int64)[:, None], self.width, 1)
        found = {
            "tokens": rows,
            "labels": rows + 1,
            "positions": np.zeros_like(rows) + np.arange(self.width),
            "document_ids": np.full_like(rows, 0),
            "letter": torch.full((len(ids),), ord(self.letter)),
            "source": np.zeros(len(ids), np.int64),
        }
        if self.extra is not None:
            found["extra"] = self.extra
        return found

    def fingerprint(self):
        return {"letter": self.letter}


def _mixed(**options):
    streams = {"a": Numbers("a"), "b": Numbers("b", 6), "c": Numbers("c", 4)}
    return MixedStream(streams, [Phase(0, (3.0, 2.0, 1.0)), Phase(40, (0.0, 1.0, 1.0))], **options)


def test_rows_are_those_of_the_streams_in_any_order_of_ids():
    stream = _mixed()
    ids = np.random.default_rng(0).permutation(60)
    arrays = stream.arrays(ids)
    sources, own = stream.mixture.locate(ids)
    assert (arrays["tokens"][:, 0] == own).all()
    assert arrays["letter"].tolist() == [ord("abc"[k]) for k in sources]
    assert (arrays["source"] == sources).all()
    assert sorted(arrays) == sorted([*Numbers("a").arrays(ids)])
    assert not len(stream.arrays(np.empty(0, np.int64))["tokens"])
    assert len(stream) == 20


SLOW = [pytest.mark.slow, pytest.mark.lane("ci")]


@pytest.mark.lane("quick")
@pytest.mark.parametrize(
    "seed", [0, 1, 2, *(pytest.param(seed, marks=SLOW) for seed in range(3, 8))]
)
def test_the_union_over_ranks_is_one_sequence_whatever_reads_it(seed):
    """Random histories of readers, batches, stops, workers and skipped windows."""
    draw = random.Random(seed)
    whole = _mixed().arrays(np.arange(400))
    want = list(zip(whole["source"].tolist(), whole["tokens"][:, 0].tolist()))
    state, got, cursor, windows = None, [], 0, []
    while cursor < 200:
        world, micro = draw.randint(1, 8), draw.choice([1, 2, 3])
        batch = micro * draw.randint(1, 6)
        workers = draw.choice([0, 0, 0, 2])
        loaders = [
            Loader(_mixed(), batch, r, world, workers if r == 0 else 0, micro_batch=micro)
            for r in range(world)
        ]
        begin_life(loaders, state)
        for _ in range(draw.randint(1, 3)):
            got += next_rows(loaders, lambda batch, own: (batch.source[own], batch.tokens[own, 0]))
            cursor += batch
        if draw.random() < 0.3:
            first = int(loaders[0].ids(cursor, cursor + 1)[0]) + draw.randint(0, 3)
            skip(loaders, windows, first, draw.randint(0, 5))
        state = end_life(loaders, draw)
    left = [i for i in range(400) if not any(a <= i <= b for a, b in windows)]
    assert [row[0] for row in got] == left[: len(got)]
    assert [row[1:] for row in got] == [want[i] for i in left[: len(got)]]


def test_a_source_ends_with_its_epochs_and_each_sample_comes_once_in_each():
    stream = _mixed(max_epochs={"a": 1, "b": 2, "c": 3})
    end = stream.mixture.end
    arrays = stream.arrays(np.arange(end))
    for k, count in ((1, 12), (2, 12)):
        own = arrays["tokens"][arrays["source"] == k, 0]
        assert own.tolist() == list(range(count))
    with rejects("instances", (0, 34), "range"):
        Loader(stream, end + 1).__next__()


def test_its_fingerprint_names_all_that_determines_rows():
    one = _mixed(max_epochs={"b": 2}).fingerprint()
    assert one["a.letter"] == "a"
    assert one["b.max_epochs"] == 2
    assert one["mixture.from_40"] == '{"a": 0.0, "b": 1.0, "c": 1.0}'
    assert one != _mixed().fingerprint()


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        (Numbers("b", width=3), ("sources", ["a", "b"], "mismatch")),
        (Numbers("b", extra=np.zeros((0, 2))), ("sources", ["a", "b"], "mismatch")),
    ],
)
def test_streams_that_differ_are_rejected(other, problem):
    with rejects(*problem):
        MixedStream({"a": Numbers("a"), "b": other}, [Phase(0, (1.0, 1.0))])


class Ragging(Numbers):
    """Row i of the stream has i % 3 entries, each of which is the row's first token."""

    def arrays(self, ids):
        found = super().arrays(ids)
        counts = np.asarray(ids) % 3
        values = torch.from_numpy(np.repeat(found["tokens"][:, 0], counts))
        offsets = torch.from_numpy(np.cumsum([0, *counts]))
        return {**found, "many": SimpleNamespace(values=values, row_offsets=offsets)}


@pytest.mark.parametrize("other", [Ragging, Numbers])
def test_ragged_extras_stay_with_their_rows(other):
    """Those of a stream of pictures among one of text, which has none."""
    mixed = MixedStream({"a": Ragging("a"), "b": other("b")}, [Phase(0, (2.0, 1.0))])
    found = mixed.arrays(np.arange(30))
    sources, own = mixed.mixture.locate(np.arange(30))
    assert {0, 1} == {*sources}
    for row in range(30):
        wanted = own[row] % 3 if sources[row] == 0 or other is Ragging else 0
        assert found["many"][row : row + 1].values.tolist() == [found["tokens"][row, 0]] * wanted
    assert len(mixed.arrays(np.arange(0))["many"]) == 0
    batch = next(Loader(mixed, 6))
    assert len(batch.split(2)[1].extras["many"]) == 2


def test_ragged_extras_of_other_shapes_are_rejected():
    floats = Ragged(torch.zeros(0), torch.zeros(1, dtype=torch.int64))
    pairs = Ragged(torch.zeros(0, 2), torch.zeros(1, dtype=torch.int64))
    streams = {"a": Numbers("a", extra=floats), "b": Numbers("b", extra=pairs)}
    with rejects("sources", ["a", "b"], "mismatch", where="extra"):
        MixedStream(streams, [Phase(0, (1.0, 1.0))])


class RaggingShards(Ragging):
    """Two shards of rows with any number of entries."""

    num_shards = 2

    def arrays(self, ids):
        ids = np.asarray(ids)
        places = np.stack([ids % 2, ids, ids], 1)
        return {**super().arrays(ids), "shard_places": places}

    def shards_of(self, ids):
        return np.asarray(ids) % 2

    def load_places(self, table):
        pass


@pytest.mark.lane("quick")
@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_ragged_extras_of_shards_stay_with_their_rows(workers):
    """Alone and mixed with text, read by workers that own shards; some have no row in a step."""
    mixed = MixedStream({"a": RaggingShards("a"), "b": Numbers("b")}, [Phase(0, (2.0, 1.0))])
    for stream in (RaggingShards("a"), mixed):
        loader = Loader(stream, 3, num_workers=workers)
        with contextlib.closing(loader):
            for step in range(4):
                ids = np.arange(3 * step, 3 * step + 3)
                wanted, batch = stream.arrays(ids), next(loader)
                many = as_ragged(wanted["many"])
                assert batch.tokens.tolist() == wanted["tokens"].tolist()
                assert batch.extras["many"].values.tolist() == many.values.tolist()
                assert batch.extras["many"].row_offsets.tolist() == many.row_offsets.tolist()


def test_sources_of_one_length_have_orders_of_their_own():
    seeds = {seed_of(0, name) for name in ("web", "books")} | {seed_of(1, "web")}
    assert len(seeds) == 3
    assert all(0 <= seed < 2**63 for seed in seeds)


class Weighted(Numbers):
    """Numbers whose labels weigh a half."""

    def arrays(self, ids):
        found = super().arrays(ids)
        return {**found, "weights": np.full(found["tokens"].shape, 0.5, np.float32)}


@pytest.mark.parametrize("kinds", [(Numbers, Weighted), (Weighted, Numbers)])
def test_sequences_without_weights_have_weight_one_among_weighted_ones(kinds):
    streams = {kind.__name__: kind("a") for kind in kinds}
    stream = MixedStream(streams, [Phase(0, (1.0, 1.0))])
    loader = Loader(stream, global_batch=8)
    batch = next(loader)
    assert batch.weights.dtype == torch.float32
    wanted = [0.5 if kinds[k] is Weighted else 1.0 for k in batch.source.tolist()]
    assert batch.weights.tolist() == [[w, w] for w in wanted]
    assert batch.label_weight == 2 * sum(wanted)
    assert loader.filler(2).weights.tolist() == [[0.0, 0.0]] * 2


@pytest.mark.parametrize("name", ["mixture", "from_5", "source", "order", "packing"])
def test_each_entry_of_a_fingerprint_changes_it(name):
    parts = [PackedStream(BuiltinCorpus("train"), 8, seed) for seed in (0, 1)]
    own = {f"{name}.{key}" for key in parts[0].fingerprint()}
    mixed = MixedStream({name: parts[0], "b": parts[1]}, [Phase(0, (1.0, 1.0))], {name: 2})
    found = PhasedStream([("", mixed, 0), (name, mixed, 5)]).fingerprint()
    inside = mixed.fingerprint()
    assert len(inside) == 2 + 2 * len(own) + 1
    assert len(found) == 2 * len(inside)
    assert {*found} >= own

    hidden = Numbers("a")
    hidden.fingerprint = lambda: {"version": 3}
    with rejects("fingerprint", "mixture.version", "duplicate"):
        MixedStream({"mixture": hidden, "b": hidden}, [Phase(0, (1.0, 1.0))]).fingerprint()
