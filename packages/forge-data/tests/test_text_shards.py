"""Text that is read from front to back: one sequence, on any number of readers, and resumed at a window's cost."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from memory_sources import Lists, begin_life, end_life, next_rows, skip

from forge_data import (
    ByteTokenizer,
    DataConfig,
    InvalidData,
    Loader,
    PhaseConfig,
    TrainingSourceConfig,
    open_training,
)
from forge_data.mixed_stream import MixedStream, seed_of
from forge_data.mixture import Phase
from forge_data.order import Permutation
from forge_data.text_shards import TextShards
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

SEQ_LEN = 16


def named_lists(sizes=(5, 3, 0, 7, 4, 2), blank=()):
    """Pieces in memory: text d of piece p is its name, over and over; some are white space."""
    return Lists(
        [
            [" " if (p, d) in blank else f"<{p}.{d}>" * (1 + (3 * p + d) % 7) for d in range(size)]
            for p, size in enumerate(sizes)
        ]
    )


class Counting(ByteTokenizer):
    """Notes what it encodes."""

    def __init__(self):
        self.seen = []

    def encode(self, text):
        self.seen.append(text)
        return super().encode(text)


def make(seed=0, tokenizer=None, shards=3, window=3, pieces=None):
    return TextShards(
        pieces or named_lists(blank={(0, 1)}),
        tokenizer or ByteTokenizer(),
        SEQ_LEN,
        seed,
        virtual_shards=shards,
        shuffle_window=window,
    )


def rows_of_shard(seed, shard, shards, window, pieces, epochs):
    """The slow obvious list: tokens of each row of a shard, epoch by epoch."""
    deal = Permutation(len(pieces), seed_of(seed, "pieces"), 0)(np.arange(len(pieces)))
    own, rows = deal[shard::shards], []
    for epoch in range(epochs):
        order = Permutation(len(own), seed_of(seed, f"shard {shard}"), epoch)(np.arange(len(own)))
        texts = [
            (((epoch * len(own) + k) << 32) + d, text)
            for k, j in enumerate(order)
            for d, text in enumerate(pieces.lists[own[j]])
        ]
        for at in range(0, len(texts), window):
            batch = texts[at : at + window]
            shuffle = Permutation(len(batch), seed_of(seed, f"window {shard}"), batch[0][0])
            tokens = [
                token
                for i in shuffle(np.arange(len(batch)))
                if batch[i][1].strip()
                for token in [*batch[i][1].encode(), 256]
            ]
            for begin in range(0, len(tokens), SEQ_LEN):
                rows.append(tokens[begin : begin + SEQ_LEN])
    return rows


@pytest.mark.lane("quick")
@pytest.mark.parametrize(
    ("seed", "shards", "window"), [(0, 3, 3), (1, 2, 1), (2, 1, 100), (3, 4, 2)]
)
def test_samples_are_those_of_the_obvious_list(seed, shards, window):
    pieces = named_lists((5, 3, 2, 7, 4), blank={(0, 1)})
    stream = make(seed, shards=shards, window=window, pieces=pieces)
    want = [rows_of_shard(seed, v, shards, window, pieces, 4) for v in range(shards)]
    ids = np.arange(shards * min(map(len, want)))
    arrays = stream.arrays(ids)
    for i in ids:
        row, document = arrays["tokens"][i], arrays["document_ids"][i]
        assert row[document >= 0].tolist() == want[i % shards][i // shards], i
    backwards = np.random.default_rng(seed).permutation(ids)
    assert (stream.arrays(backwards)["tokens"] == arrays["tokens"][backwards]).all()


def test_each_document_comes_once_in_each_epoch_of_its_shard():
    pieces, tokenizer = named_lists((5, 3, 2, 7, 4)), Counting()
    stream = make(5, tokenizer, shards=2, window=4, pieces=pieces)
    rows = [len(rows_of_shard(5, v, 2, 4, pieces, 3)) for v in range(2)]
    for shard in range(2):
        stream.arrays(np.arange(rows[shard]) * 2 + shard)
    assert Counter(tokenizer.seen) == {text: 3 for texts in pieces.lists for text in texts}


def test_its_length_is_an_error_with_the_reason():
    with pytest.raises(TypeError, match=r"TextShards\.__len__"):
        len(make())


def test_a_shard_without_text_is_an_error_and_no_endless_loop():
    with rejects("shard", 2, "empty", InvalidData):
        make(pieces=named_lists((2, 0, 3))).arrays(np.arange(3))


def test_rows_of_another_length_are_rejected_for_shards(monkeypatch):
    monkeypatch.setattr("forge_data.sources.open.open_stream", lambda *_: make())
    phases = {"long": PhaseConfig(100, seq_len=2 * SEQ_LEN)}
    config = DataConfig(SEQ_LEN, sources={"a": TrainingSourceConfig()}, phases=phases)
    with rejects("phases.long.seq_len", 2 * SEQ_LEN, "mismatch"):
        open_training(config)


@pytest.mark.parametrize("key", ["virtual_shards", "shuffle_window"])
def test_numbers_out_of_range_are_rejected(key):
    with rejects(key, 0, "range"):
        TextShards(named_lists(), ByteTokenizer(), 4, **{key: 0})


def share(loaders):
    """What an all-reduce over the ranks does."""
    tables = []
    for loader in loaders:
        loader.share_places(lambda table: tables.append(table) or table)
    for loader in loaders:
        loader.share_places(lambda table: np.maximum.reduce(tables))


def one(seed, tokenizer=None):
    return make(seed, tokenizer)


def mixed(seed, tokenizer=None):
    streams = {"a": make(seed, tokenizer), "b": make(seed + 1, tokenizer, shards=2)}
    return MixedStream(streams, [Phase(0, (2.0, 1.0)), Phase(30, (1.0, 3.0))])


def tokens_without_extras(batch, own):
    assert not batch.extras
    return (batch.tokens[own],)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [one, mixed])
@pytest.mark.parametrize("seed", range(6))
def test_the_union_over_ranks_is_one_sequence_whatever_reads_it(kind, seed):
    """Random histories of readers, batches, workers, stops and skipped windows."""
    draw = random.Random(seed)
    whole = kind(seed).arrays(np.arange(300))["tokens"]
    state, got, cursor, windows = None, [], 0, []
    while cursor < 100:
        world, micro = draw.randint(1, 4), draw.choice([1, 2, 3])
        batch = micro * draw.randint(1, 6)
        workers, prefetch = draw.choice([(0, 0), (0, 0), (0, 2), (2, None), (3, 5)])
        loaders = [
            Loader(kind(seed), batch, r, world, *((workers,) if r == 0 else ()), micro_batch=micro,
                   prefetch=prefetch if r == 0 else None)
            for r in range(world)
        ]  # fmt: skip
        begin_life(loaders, state)
        for _ in range(draw.randint(1, 4)):
            got += next_rows(loaders, tokens_without_extras)
            cursor += batch
        if draw.random() < 0.4:
            first = int(loaders[0].ids(cursor, cursor + 1)[0]) + draw.randint(0, 3)
            skip(loaders, windows, first, draw.randint(0, 9))
        share(loaders)
        state = end_life(loaders, draw)
    left = [i for i in range(300) if not any(a <= i <= b for a, b in windows)]
    assert [row[0] for row in got] == left[: len(got)]
    assert [row[1] for row in got] == whole[left[: len(got)]].tolist()


@pytest.mark.parametrize("kind", [one, mixed])
def test_a_resume_tokenizes_at_most_one_window_of_each_shard(kind):
    loader = Loader(kind(0), 6)
    for _ in range(20):
        next(loader)
    state = loader.state_dict()
    tokenizer = Counting()
    resumed = Loader(kind(0, tokenizer), 6)
    resumed.load_state_dict(state)
    batch = next(resumed)
    assert batch.tokens.tolist() == next(loader).tokens.tolist()
    windows = len({*resumed.stream.shards_of(batch.instance_ids.numpy())})
    # a row may be the first of the window behind the place: that one is read, too
    assert 0 < len(tokenizer.seen) <= windows * 3 * 2
    cold = Counting()
    kind(0, cold).arrays(batch.instance_ids.numpy())
    assert len(cold.seen) > 3 * len(tokenizer.seen)


def test_a_rank_tokenizes_only_its_own_shards_where_they_divide():
    seen = []
    for rank in range(3):
        tokenizer = Counting()
        loader = Loader(
            make(0, tokenizer, shards=6, window=2, pieces=named_lists((3,) * 6)), 3, rank, 3
        )
        for _ in range(8):
            next(loader)
        seen.append({text.split(".")[0] for text in tokenizer.seen})  # pieces
    assert [len(own) for own in seen] == [2, 2, 2]
    assert len(set.union(*seen)) == 6


def test_cursors_of_another_source_are_rejected():
    loader = Loader(make(), 2)
    next(loader)
    state = loader.state_dict()
    for places in ([[3, 0, 0]], [[0, -1, 0]], [[0, 1]], "none"):
        problem = (places, "type") if places == "none" else (places[0], "range")
        with rejects("shard_places", *problem, where="loader state: "):
            loader.load_state_dict({**state, "shard_places": places})
    with rejects(
        "fingerprint",
        ["stream.shuffle_window"],
        "mismatch",
        InvalidData,
        where="checkpoint 3, now 4",
    ):
        Loader(make(window=4), 2).load_state_dict(state)
