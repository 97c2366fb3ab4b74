"""Random lives of a run over all that decides its rows: mixtures in phases, packing, shards, batches, ranks, workers, skips."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from memory_sources import Lists

from forge_data import (
    ByteTokenizer,
    DataConfig,
    Loader,
    PackingConfig,
    PhaseConfig,
    TrainingSourceConfig,
    open_stream,
    open_training,
)
from forge_data.mixed_stream import MixedStream, seed_of
from forge_data.mixture import Phase
from forge_data.phases import phase_segments
from forge_data.prepare import prepare
from forge_data.text_shards import TextShards

pytestmark = pytest.mark.lane("test")

SEED, ROWS = 3, 300
NAMES = "abc"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Three sources of token files, of some 60 to 160 rows of 16."""
    folder, draw = tmp_path_factory.mktemp("sources"), random.Random(0)
    for name, documents in zip(NAMES, (20, 35, 50)):
        texts = [f"{name}{d} " * draw.randint(1, 24) for d in range(documents)]
        (folder / f"{name}.txt").write_text("\n".join(texts))
        prepare([folder / f"{name}.txt"], folder / name, document="line")
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("FORGE_CACHE", str(tmp_path_factory.getbasetemp() / "plans"))


def config_of(folders, draw):
    """Two or three sources, one with an end, any packing, up to four phases that change rows or weights."""
    names = NAMES[: draw.choice([2, 3])]
    limited = draw.choice([None, *names[1:]])
    sources = {
        name: TrainingSourceConfig(
            "tokens",
            str(folders / name),
            weight=draw.choice([1.0, 2.0, 3.5]),
            max_epochs=draw.choice([1, 2]) if name == limited else None,
        )
        for name in names
    }
    phases, start = {}, 0
    for number in range(draw.randint(0, 4)):
        start += draw.randint(1, 60)
        seq_len = draw.choice([16, 24, 40])
        weights = {name: 1.0 + number + draw.random() for name in {names[0], draw.choice(names)}}
        phases[f"p{number}"] = PhaseConfig(start_instance=start, seq_len=seq_len, weights=weights)
    policy = draw.choice(["concatenate", "first_fit", "best_fit"])
    return DataConfig(16, sources=sources, phases=phases, packing=PackingConfig(policy))


def rows_of(arrays):
    """Each row as (source, tokens, document of each), without padding."""
    found = zip(*(np.asarray(arrays[name]) for name in ("source", "tokens", "document_ids")))
    return [(int(s), t[d >= 0].tolist(), d[d >= 0].tolist()) for s, t, d in found]


def obvious_rows(config, stream):
    """Rows 0 .. ROWS - 1, counted one by one: a source's next row whenever it is its turn."""
    found, made = [], phase_segments(config)
    begun = given = [0] * len(config.sources)
    read = [range(1)] * len(config.sources)
    turns = [int(s) for i in range(ROWS) for s in stream.arrays(np.array([i]))["source"]]
    edges = [*(s.start for s in made), ROWS]
    for number, (segment, (first, last)) in enumerate(zip(made, pairwise(edges))):
        if not number or segment.seq_len != made[number - 1].seq_len:  # all begin anew
            seed = seed_of(SEED, f"phase {segment.name}") if segment.name else SEED
            own = [
                open_stream(source, segment.seq_len, seed_of(seed, name), config.packing)
                for name, source in config.sources.items()
            ]
            # F148: an epoch that an earlier length began counts, finished or not
            begun = [e + -(-count // len(rows)) for e, count, rows in zip(begun, given, read)]
            given, read = [0] * len(own), own
        left = [
            source.max_epochs and max(0, source.max_epochs - e) * len(rows) - count
            for source, e, rows, count in zip(config.sources.values(), begun, own, given)
        ]
        check_counts(config, segment, turns[first:last], left)
        for turn in turns[first:last]:
            (row,) = rows_of({**own[turn].arrays(np.array([given[turn]])), "source": [turn]})
            found.append(row)
            given[turn] += 1
    return found


def check_counts(config, segment, turns, left):
    """Of each source as many as its share of those that have rows left, to two rows."""
    weights = [
        source.weight if segment.weights is None else segment.weights.get(name, 0.0)
        for name, source in config.sources.items()
    ]
    due = [0.0] * len(weights)
    for position, turn in enumerate(turns):
        counts = Counter(turns[:position])
        open_ = [
            w if limit is None or counts[k] < limit else 0.0
            for k, (w, limit) in enumerate(zip(weights, left))
        ]
        assert open_[turn]
        due = [d + w / sum(open_) for d, w in zip(due, open_)]
    counts = Counter(turns)
    assert all(abs(counts[k] - d) <= 2.0 for k, d in enumerate(due)), (counts, due)


def sharded_stream(folders):
    """A set that is read front to back beside token files, in two phases."""
    pieces = [[f"{p}.{d} " * (1 + (5 * p + d) % 9) for d in range(2 + p % 3)] for p in range(7)]
    shards = TextShards(Lists(pieces), ByteTokenizer(), 16, 1, virtual_shards=5, shuffle_window=2)
    packed = open_stream(TrainingSourceConfig("tokens", str(folders / "a")), 16, 2)
    return MixedStream({"s": shards, "a": packed}, [Phase(0, (2.0, 1.0)), Phase(70, (1.0, 3.0))])


class Ranks:
    """Loaders of all ranks of one life, and what the runner does with them."""

    def __init__(self, make, draw, state):
        self.world, micro = draw.randint(1, 8), draw.choice([1, 2, 3])
        batch, busy = micro * draw.randint(1, 6), draw.randrange(self.world)
        self.loaders = []
        for rank in range(self.world):
            # processes cost: one rank in most lives
            workers = draw.choice([0, 0, 0, 0, 1, 2, 3]) if rank == busy else 0
            prefetch = max(workers, draw.choice([0, 0, 2, 5]))
            options = {"micro_batch": micro, "prefetch": prefetch}
            self.loaders.append(Loader(make(), batch, rank, self.world, workers, **options))
        self.each("load_state_dict", state)

    def each(self, method, *arguments):
        for loader in self.loaders:
            getattr(loader, method)(*arguments)

    def step(self):
        """The rows of a step in order of instances: (instance, row)."""
        found, batches = [], [next(loader) for loader in self.loaders]
        assert len({(len(b), b.digest, b.tokens.size(1)) for b in batches}) == 1
        for batch in batches:
            own = batch.instance_ids >= 0
            arrays = {
                "source": batch.source[own],
                "tokens": batch.tokens[own],
                "document_ids": batch.document_ids[own],
            }
            found += zip(batch.instance_ids[own].tolist(), rows_of(arrays))
        return sorted(found)

    def state(self, draw):
        """That of any rank, as all are equal."""
        tables = []
        self.each("share_places", lambda table: tables.append(table) or table)
        self.each("share_places", lambda table: np.maximum.reduce(tables))
        states = [loader.state_dict() for loader in self.loaders]
        assert all(other == states[0] for other in states)
        return states[draw.randrange(self.world)]

    def skip(self, first, last):
        """As a rollback leaves data out that is ahead."""
        following = self.loaders[0].next_instance
        if last >= following:
            self.each("skip", max(first, following), last)


def live(make, draw, until):
    """(what a run was given, in order; the windows that it left out) over lives that end anywhere."""
    first = Loader(make(), 1)
    saves, got = [(0, first.state_dict())], []
    while len(got) < until:
        ranks = Ranks(make, draw, saves[-1][1])
        for _ in range(draw.randint(1, 6)):
            got += ranks.step()
            if draw.random() < 0.25:
                micro = draw.choice([1, 2])
                ranks.each("rebatch", micro * draw.randint(1, 5), micro)
            if draw.random() < 0.15:
                begin = ranks.loaders[0].next_instance + draw.randint(0, 9)
                ranks.skip(begin, begin + draw.randint(0, 9))
            if draw.random() < 0.4:
                saves.append((len(got), ranks.state(draw)))
            if draw.random() < 0.1:  # back to some save, without the last instances
                windows = [*ranks.loaders[0].skipped, (got[-1][0] - draw.randint(0, 4), got[-1][0])]
                saves = saves[: 1 + max(0, len(saves) - draw.randint(1, 2))]
                count, state = saves[-1]
                del got[count:]
                ranks.each("load_state_dict", state)
                for window in windows:
                    ranks.skip(max(0, window[0]), window[1])
                saves.append((len(got), ranks.state(draw)))
        if draw.random() < 0.5:
            saves.append((len(got), ranks.state(draw)))
        ranks.each("close")
        del got[saves[-1][0] :]  # a kill: the next life begins at the last save
    return got, saves[-1][1].get("skipped", [])


def check_history(make, draw, rows):
    got, windows = live(make, draw, 130)
    left = [i for i in range(len(rows)) if not any(a <= i <= b for a, b in windows)]
    assert got[-1][0] < len(rows)
    assert [instance for instance, _ in got] == left[: len(got)]
    assert [row for _, row in got] == [rows[i] for i in left[: len(got)]]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_any_history_reads_the_one_sequence_of_its_config(folders, seed):
    draw = random.Random(seed)
    config = config_of(folders, draw)
    stream = open_training(config, SEED)
    check_history(lambda: stream, draw, obvious_rows(config, stream))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_any_history_reads_the_one_sequence_of_shards_and_files(folders, seed):
    draw = random.Random(seed)
    rows = rows_of(sharded_stream(folders).arrays(np.arange(ROWS)))
    check_history(lambda: sharded_stream(folders), draw, rows)


@pytest.mark.parametrize("policy", ["concatenate", "first_fit", "best_fit"])
@pytest.mark.parametrize("seq_len", [16, 40])
def test_each_row_and_token_comes_once_in_an_epoch(folders, policy, seq_len):
    stream = open_stream(
        TrainingSourceConfig("tokens", str(folders / "b")), seq_len, 5, PackingConfig(policy)
    )
    n, source = len(stream), stream.source
    for epoch in range(2):
        arrays = stream.arrays(np.arange(epoch * n, (epoch + 1) * n))
        inputs = arrays["tokens"][arrays["document_ids"] >= 0]
        assert Counter(inputs.tolist()) == Counter(source.read(0, source.num_tokens).tolist())
