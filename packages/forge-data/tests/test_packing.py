"""Concatenate and split against the slow obvious way."""

import json
from functools import partial

import numpy as np
import pytest
from memory_sources import Listed, random_documents

from forge_data import BuiltinCorpus, PackedStream, Permutation, batch_of
from forge_testing.interleave import interleave
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")


PAD = {"tokens": 0, "labels": -100, "positions": 0, "document_ids": -1}


def slow_row(documents, row, seq_len):
    """One row, token by token."""
    stream = [(d, i) for d, document in enumerate(documents) for i in range(len(document))]
    out = {name: [] for name in PAD}
    for t in range(row * seq_len, (row + 1) * seq_len):
        values = dict(PAD)
        if t < len(stream):
            d, i = stream[t]
            begins = stream[row * seq_len]  # of the row
            values["tokens"] = documents[d][i]
            values["labels"] = documents[d][i + 1] if i + 1 < len(documents[d]) else -100
            values["positions"] = i - begins[1] if d == begins[0] else i
            values["document_ids"] = d - begins[0]
        for name, value in values.items():
            out[name].append(value)
    return out


@pytest.mark.parametrize("seq_len", [1, 2, 7, 16, 1000])
@pytest.mark.parametrize("seed", [0, 1])
def test_rows_equal_the_slow_way(seq_len, seed):
    documents = random_documents(seed)
    stream = PackedStream(Listed(documents), seq_len, seed=0, shuffle=False)
    for row in range(len(stream)):
        expected = slow_row(documents, row, seq_len)
        got = stream.instance(row)
        for name, values in expected.items():
            assert got[name].dtype == np.int64
            assert got[name].tolist() == values, (row, name)


def test_F47_the_last_token_of_a_document_does_not_predict_the_next_document():
    stream = PackedStream(Listed([[1, 2, 9], [3, 4, 9]]), seq_len=6, shuffle=False)
    row = stream.instance(0)
    assert row["labels"].tolist() == [2, 9, -100, 4, 9, -100]
    assert row["document_ids"].tolist() == [0, 0, 0, 1, 1, 1]
    assert row["positions"].tolist() == [0, 1, 2, 0, 1, 2]


def test_F47_nor_where_a_boundary_falls_between_two_rows():
    stream = PackedStream(Listed([[1, 2, 9], [3, 4, 9]]), seq_len=3, shuffle=False)
    assert stream.instance(0)["labels"].tolist() == [2, 9, -100]


def test_F48_long_documents_are_split_over_rows_never_dropped():
    documents = [list(range(100)), [7], list(range(50))]
    stream = PackedStream(Listed(documents), seq_len=8, seed=3)
    rows = {int(stream.rows(np.array([i]))[0]): stream.instance(i) for i in range(len(stream))}
    tokens = [t for r in sorted(rows) for t in rows[r]["tokens"][rows[r]["document_ids"] >= 0]]
    assert tokens == [t for d in documents for t in d]


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_uses_every_sample_exactly_once(shuffle):
    stream = PackedStream(Listed(random_documents(2)), seq_len=4, seed=5, shuffle=shuffle)
    n = len(stream)
    for epoch in range(3):
        rows = stream.rows(np.arange(epoch * n, (epoch + 1) * n))
        assert sorted(rows.tolist()) == list(range(n))


def test_epochs_have_orders_of_their_own_and_a_batch_may_span_two():
    stream = PackedStream(Listed(random_documents(2)), seq_len=4, seed=5)
    n = len(stream)
    assert stream.rows(np.arange(n)).tolist() != stream.rows(np.arange(n, 2 * n)).tolist()
    across = stream.rows(np.arange(n - 3, n + 3)).tolist()
    assert across == [int(stream.rows(np.array([i]))[0]) for i in range(n - 3, n + 3)]


def test_batch_holds_the_requested_samples():
    stream = PackedStream(BuiltinCorpus(), 32, seed=1)
    batch = batch_of(stream, [5, 3, 10**6])
    for row, i in enumerate([5, 3, 10**6]):
        for name, values in stream.instance(i).items():
            assert getattr(batch, name)[row].tolist() == values.tolist()
    assert batch.instance_ids.tolist() == [5, 3, 10**6]
    assert batch.label_weight == int((batch.labels != -100).sum())


@pytest.mark.parametrize(
    "change", [{"seq_len": 8}, {"seed": 2}, {"shuffle": False}, {"documents": 3}]
)
def test_the_fingerprint_depends_on_all_that_the_stream_does(change):
    base = {"seq_len": 4, "seed": 1, "shuffle": True, "documents": 2}

    def fingerprint(documents, **settings):
        return PackedStream(Listed(random_documents(documents)), **settings).fingerprint()

    assert fingerprint(**base) == fingerprint(**base)
    assert fingerprint(**base) != fingerprint(**{**base, **change})
    assert json.loads(json.dumps(fingerprint(**base))) == fingerprint(**base)


def test_bad_arguments_are_rejected():
    with rejects("seq_len", 0, "range"):
        PackedStream(BuiltinCorpus(), 0)
    with rejects("instance", -1, "range"):
        PackedStream(BuiltinCorpus(), 8).instance(-1)


def test_rows_are_those_of_the_permutation_in_any_order_of_calls():
    documents = random_documents(4, count=400)
    stream = PackedStream(Listed(documents), seq_len=4, seed=5)
    n = len(stream)
    assert n > 3 * 128  # blocks of positions, whose rows are kept between calls
    want = [int(r) for epoch in (0, 1) for r in Permutation(n, 5, epoch)(np.arange(n))]
    rng = np.random.default_rng(0)
    for _ in range(60):
        first = int(rng.integers(0, 2 * n))
        ids = np.arange(first, min(2 * n, first + int(rng.integers(1, 700))))
        rng.shuffle(ids)
        assert stream.rows(ids).tolist() == [want[i] for i in ids]
    assert stream.rows(np.empty(0, np.int64)).tolist() == []


def test_F219_rows_are_those_of_their_epoch_while_another_thread_reads_another_epoch():
    """A thread that read ahead is not waited for where a loader goes on from another row."""
    ids = [np.arange(3), np.arange(40, 43)]
    wanted = [_stream(40).rows(each).tolist() for each in ids]
    for here, there in ((0, 1), (1, 0)):
        stream = _stream(40)
        interleave(stream, partial(stream.rows, ids[there]))
        assert stream.rows(ids[here]).tolist() == wanted[here]


def test_F219_rows_are_read_while_another_thread_reads_earlier_ones(monkeypatch):
    """Rows of two blocks, where the other thread drops the first block after it was made."""
    stream, calls = _stream(400), []
    wanted = stream.rows(np.arange(100, 160)).tolist()
    stream, order = _stream(400), Permutation.__call__

    def interrupted(self, positions):
        rows = order(self, positions)
        calls.append(len(positions))
        if len(calls) == 2:
            stream.rows(np.arange(300, 310))
        return rows

    monkeypatch.setattr(Permutation, "__call__", interrupted)
    assert stream.rows(np.arange(100, 160)).tolist() == wanted
    assert len(calls) == 3


def _stream(epoch):
    """Rows of 4 tokens, so many an epoch."""
    return PackedStream(Listed([list(range(4 * epoch))]), seq_len=4, seed=5)
