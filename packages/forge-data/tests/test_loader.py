"""The stream does not depend on who reads it."""

import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

from forge_data import Batch, BuiltinCorpus, InvalidData, Loader, PackedStream, filler_batch
from forge_testing.problems import assert_problem, rejects

pytestmark = pytest.mark.lane("test")

TENSORS = ("tokens", "labels", "positions", "document_ids", "instance_ids")


@pytest.fixture(scope="module")
def stream():
    return PackedStream(BuiltinCorpus("validation"), seq_len=64, seed=3)


def take(loader, steps):
    batches = [next(loader) for _ in range(steps)]
    loader.close()
    return batches


def same(a, b):
    return a.digest == b.digest and all(torch.equal(getattr(a, n), getattr(b, n)) for n in TENSORS)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_stream_does_not_depend_on_workers(stream, num_workers):
    alone = take(Loader(stream, 4), 7)
    read_ahead = take(Loader(stream, 4, num_workers=num_workers), 7)
    assert all(same(a, b) for a, b in zip(alone, read_ahead, strict=True))


def test_F42_every_worker_reads_steps_of_its_own(stream):
    ids = [i for b in take(Loader(stream, 4, num_workers=2), 8) for i in b.instance_ids.tolist()]
    assert ids == list(range(32))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_stream_does_not_depend_on_world_size(stream, world_size):
    """Ranks read disjoint rows whose union is the global batch, under one digest."""
    whole = take(Loader(stream, 8), 3)
    ranks = [take(Loader(stream, 8, rank=r, world_size=world_size), 3) for r in range(world_size)]
    for step, batch in enumerate(whole):
        parts = [rank[step] for rank in ranks]
        assert {part.digest for part in parts} == {batch.digest}
        for name in TENSORS:
            joined = torch.cat([getattr(part, name) for part in parts])
            assert torch.equal(joined, getattr(batch, name))


@pytest.mark.lane("quick")
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(("world_size", "micro_batch"), [(3, 1), (5, 1), (3, 4), (5, 4), (7, 2)])
def test_F101_any_number_of_ranks_gets_full_micro_batches(
    stream, world_size, micro_batch, num_workers
):
    """In stream order, the first ranks one more; filler behind the rows, never among them."""
    ranks = [
        take(Loader(stream, 16, r, world_size, num_workers, micro_batch=micro_batch), 2)
        for r in range(world_size)
    ]
    for step, batch in enumerate(take(Loader(stream, 16), 2)):
        parts = [rank[step] for rank in ranks]
        assert {part.digest for part in parts} == {batch.digest}
        assert len({len(part.tokens) for part in parts}) == 1
        assert sum(part.label_weight for part in parts) == batch.label_weight
        real = [[m for m in p.split(micro_batch) if m.instance_ids[0] >= 0] for p in parts]
        shares = [len(one) for one in real]
        assert shares == sorted(shares, reverse=True)
        assert max(shares) - min(shares) <= 1
        for name in TENSORS:
            joined = torch.cat([getattr(m, name) for one in real for m in one])
            assert torch.equal(joined, getattr(batch, name))
        for part, share in zip(parts, shares, strict=True):
            filler = filler_batch(len(part.tokens) - share * micro_batch, 64)
            for name in TENSORS:
                assert torch.equal(
                    getattr(part, name)[share * micro_batch :], getattr(filler, name)
                )


def test_F101_a_schedule_may_want_more_micro_batches(stream):
    batch = next(Loader(stream, 4, 0, 2, micro_batch=2, num_micro_batches=3))
    assert batch.instance_ids.tolist() == [0, 1, -1, -1, -1, -1]


@pytest.mark.parametrize(
    ("before", "after"),
    [((4, 8), (3, 8)), ((3, 8), (5, 7)), ((1, 8), (4, 8)), ((4, 8), (2, 12)), ((2, 4), (1, 6))],
)
def test_F44_resume_at_another_world_size_neither_repeats_nor_skips(stream, before, after):
    seen, state = [], None
    for world_size, global_batch in (before, after):
        loaders = [Loader(stream, global_batch, r, world_size) for r in range(world_size)]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
        for _ in range(3):
            seen += [i for loader in loaders for i in next(loader).instance_ids.tolist() if i >= 0]
        states = [loader.state_dict() for loader in loaders]
        assert all(s == states[0] for s in states)
        state = states[0]
    assert seen == list(range(3 * (before[1] + after[1])))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_F43_resume_goes_on_after_the_batches_handed_out_not_the_prefetched(stream, num_workers):
    through = take(Loader(stream, 4), 6)
    first = Loader(stream, 4, num_workers=num_workers)
    take(first, 3)
    state = first.state_dict()
    assert state["cursor"] == 12
    second = Loader(stream, 4, num_workers=num_workers)
    next(second)  # a loader that already ran may be moved too
    second.load_state_dict(state)
    assert all(same(a, b) for a, b in zip(through[3:], take(second, 3), strict=True))


def test_digest_chain_goes_on_at_a_resume(stream):
    through, first, second = (Loader(stream, 4) for _ in range(3))
    take(through, 5)
    take(first, 2)
    second.load_state_dict(first.state_dict())
    take(second, 3)
    assert second.state_dict()["digest_chain"] == through.state_dict()["digest_chain"]
    other = Loader(stream, 5)
    take(other, 4)
    assert other.cursor == through.cursor
    assert other.state_dict()["digest_chain"] != through.state_dict()["digest_chain"]


def test_resume_is_O1(stream):
    loader = Loader(stream, 4)
    fingerprint = loader.state_dict()["fingerprint"]
    loader.load_state_dict({"cursor": 10**15, "digest_chain": "1" * 16, "fingerprint": fingerprint})
    assert next(loader).instance_ids.tolist() == [10**15 + i for i in range(4)]


def test_changed_data_at_resume_is_rejected_with_a_diff(stream):
    state = Loader(PackedStream(BuiltinCorpus("validation"), 32, seed=3), 4).state_dict()
    loader = Loader(stream, 4)
    next(loader)
    with rejects(
        "fingerprint",
        ["packing.plan", "packing.seq_len"],
        "mismatch",
        InvalidData,
        where="packing.seq_len: checkpoint 32, now 64",
    ) as error:
        loader.load_state_dict(state)
    assert "order.seed" not in str(error.value)
    assert loader.cursor == 4
    _, *lines = str(error.value).splitlines()
    kinds = ["..." in line for line in lines]
    assert kinds == sorted(kinds), "numbers and names first, then digests"
    assert kinds[-1]
    assert max(map(len, lines)) < 80


OFF = {
    "cursor one off": ({"cursor": 9}, ("cursor", 9, "mismatch")),
    "cursor at 0": ({"cursor": 0}, ("last_batch", 4, "range")),
    "cursor a batch ahead": ({"cursor": 12}, ("cursor", 12, "mismatch")),
    "cursor text of 5000 digits": ({"cursor": "9" * 5000}, ("cursor", "9" * 5000, "range")),
    "chain of another run": ({"digest_chain": "1" * 16}, ("cursor", 8, "mismatch")),
    "chain of no steps": ({"digest_chain": "0" * 16}, ("cursor", 8, "mismatch")),
    "chain before missing": (
        {"digest_chain_before": None},
        ("digest_chain_before", None, "format"),
    ),
    "chain before other": ({"digest_chain_before": "1" * 16}, ("cursor", 8, "mismatch")),
    "last batch other": ({"last_batch": 5}, ("cursor", 8, "mismatch")),
    "last batch absurd": ({"last_batch": 2**60}, ("last_batch", 2**60, "range")),
    "last batch text": ({"last_batch": "4"}, ("last_batch", "4", "range")),
    "last batch none": ({"last_batch": 0}, ("cursor", 8, "mismatch")),
}


@pytest.mark.parametrize("name", OFF)
def test_F97_a_cursor_that_is_not_where_the_chain_of_digests_ends(stream, name):
    """It would repeat instances, or skip some."""
    source, loader = Loader(stream, 4), Loader(stream, 4)
    take(source, 2)
    next(loader)
    before = loader.state_dict()
    changes, problem = OFF[name]
    with rejects(*problem, where="loader state: ") as error:
        loader.load_state_dict({**source.state_dict(), **changes})
    assert not isinstance(error.value, InvalidData)
    assert len(str(error.value)) < 350
    assert loader.state_dict() == before


def test_states_of_older_versions_load(stream):
    source, loader = Loader(stream, 4), Loader(stream, 4)
    take(source, 2)
    state = source.state_dict()
    old = {k: state[k] for k in ("cursor", "digest_chain", "fingerprint")}
    loader.load_state_dict(old)
    assert loader.state_dict() == old, "saved again before the next batch"
    assert next(loader).instance_ids.tolist() == [8, 9, 10, 11]
    source.load_state_dict(loader.state_dict())


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ({}, ("fingerprint", ..., "missing")),
        ([1], ("fingerprint", ..., "missing")),
        ({"cursor": -1}, ("cursor", -1, "range")),
        ({"cursor": 1.5}, ("cursor", 1.5, "range")),
        ({"cursor": True}, ("cursor", True, "range")),
        ({"cursor": 2**80}, ("cursor", 2**80, "range")),
        ({"digest_chain": "no"}, ("digest_chain", "no", "format")),
        ({"digest_chain": None}, ("digest_chain", None, "format")),
        ({"fingerprint": 3}, ("fingerprint", ..., "missing")),
    ],
)
def test_F102_an_invalid_state_is_rejected(stream, bad, problem):
    loader = Loader(stream, 4)
    state = {**loader.state_dict(), **bad} if isinstance(bad, dict) and bad else bad
    for load in (loader.load_checks, loader.load_state_dict):
        with rejects(*problem, where="loader state: ") as caught:
            load(state)
        assert not isinstance(caught.value, InvalidData)
    assert loader.cursor == 0


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            {"global_batch": 6, "micro_batch": 4},
            ("micro_batch", 4, "divides"),
        ),
        ({"global_batch": 6, "micro_batch": 0}, ("micro_batch", 0, "divides")),
        (
            {"global_batch": 8, "world_size": 3, "num_micro_batches": 2},
            ("num_micro_batches", 2, "range"),
        ),
        ({"global_batch": 0}, ("global_batch", 0, "range")),
        ({"global_batch": 4, "rank": 2, "world_size": 2}, ("rank", 2, "range")),
        ({"global_batch": 4, "num_workers": -1}, ("num_workers", -1, "range")),
        ({"global_batch": 4, "num_workers": 100_000}, ("num_workers", 100000, "range")),
        ({"global_batch": 10**9}, ("global_batch", 1000000000, "range")),
        ({"global_batch": 4, "prefetch": -1}, ("prefetch", -1, "range")),
        (
            {"global_batch": 4, "num_workers": 3, "prefetch": 2},
            ("prefetch", 2, "below_workers"),
        ),
    ],
)
def test_F107_bad_arguments_are_rejected(stream, arguments, problem):
    with rejects(*problem):
        Loader(stream, **arguments)


def test_F107_absurd_sizes_are_rejected_before_memory_is_allocated():
    source = BuiltinCorpus("validation")
    for seq_len in (0, 10**12, 2**70):
        with rejects("seq_len", seq_len, "range"):
            PackedStream(source, seq_len)
    with rejects("rows", 32, "range"):
        next(Loader(PackedStream(source, 1 << 24), 32))


class Failing:
    """A stream that cannot read from instance 8 on."""

    def __init__(self, error):
        self.error = error

    def arrays(self, ids):
        if max(ids, default=0) >= 8:
            raise self.error
        return {n: np.zeros((len(ids), 4), np.int64) for n in TENSORS[:4]}

    def fingerprint(self):
        return {}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("error", [InvalidData("block 7 is gone"), RuntimeError("no such tape")])
def test_an_error_while_reading_surfaces_with_its_message(num_workers, error):
    loader = Loader(Failing(error), 4, num_workers=num_workers)
    take(loader, 2)
    loader.load_state_dict({"cursor": 4, "digest_chain": "1" * 16, "fingerprint": {}})
    next(loader)
    with pytest.raises(InvalidData, match=str(error)) as caught:
        next(loader)
    if not isinstance(error, InvalidData):
        assert_problem(caught.value, "", ..., "source_error")
    assert loader.cursor == 8
    filler, found = loader.next_or_filler()
    assert type(found) is InvalidData
    assert (len(filler), filler.label_weight) == (loader.micro_batch, 0)
    loader.close()


def test_a_batch_that_cannot_be_prepared_is_padding(stream):
    loader, error = Loader(stream, 4), RuntimeError("no room on the device")

    def fail(batch):
        raise error

    assert loader.next_or_filler(lambda batch: batch.digest) == (
        take(Loader(stream, 4), 1)[0].digest,
        None,
    )
    filler, found = loader.next_or_filler(fail)
    assert (found, filler.label_weight) == (error, 0)


def test_workers_draw_nothing_from_the_global_generator(stream):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    take(Loader(stream, 4, num_workers=2), 2)
    assert torch.equal(before, torch.get_rng_state())


def run_script(body):
    script = "from forge_data import *\nif __name__ == '__main__':\n" + textwrap.indent(
        textwrap.dedent(body), "    "
    )
    command = [sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


LOADER = "loader = Loader(PackedStream(BuiltinCorpus(), 64), 4, num_workers=2)\nnext(loader)\n"


@pytest.mark.slow
def test_a_process_that_forgets_to_close_its_loader_still_ends():
    done = run_script(LOADER + "def f(workers):\n    raise KeyError('x')\nf(loader._ahead)\n")
    assert done.returncode == 1
    assert done.stderr.strip().endswith("KeyError: 'x'")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "killpg"), reason="process groups")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"])
def test_a_stop_signal_to_the_process_group_leaves_the_workers_reading(name):
    """The parent decides when to stop, and may need another batch before its save."""
    done = run_script(
        f"""
        import os, signal
        os.setsid()
        caught = []
        signal.signal(signal.{name}, lambda *_: caught.append(1))
        loader = Loader(PackedStream(BuiltinCorpus(), 64), 4, num_workers=2)
        for _ in range(3):
            next(loader)
        os.killpg(0, signal.{name})
        for _ in range(20):
            next(loader)
        loader.close()
        print(len(caught), loader.cursor)
        """
    )
    assert (done.stdout.strip(), done.returncode) == ("1 92", 0), done.stderr
    assert int(getattr(signal, name)) > 0


def test_streams_are_small_to_send(stream):
    assert len(pickle.dumps(stream)) < 2000
    again = pickle.loads(pickle.dumps(stream))
    assert again.fingerprint() == stream.fingerprint()


def test_split_keeps_rows_and_counts_its_own_labels(stream):
    batch = next(Loader(stream, 6))
    parts = batch.split(2)
    assert [len(p.tokens) for p in parts] == [2, 2, 2]
    assert sum(p.label_weight for p in parts) == batch.label_weight
    assert torch.equal(torch.cat([p.labels for p in parts]), batch.labels)
    assert {p.digest for p in parts} == {batch.digest}
    with rejects("micro_batch", 4, "divides"):
        batch.split(4)


def test_zero_valid_labels_is_a_count_of_zero():
    ids = torch.zeros(1, 2, dtype=torch.int64)
    batch = Batch(ids, ids - 100, ids, ids, ids[0, :1], "0" * 16)
    assert batch.label_weight == 0
    assert batch.to("cpu").label_weight == 0


def test_to_moves_everything_and_keeps_the_count(stream):
    batch = next(Loader(stream, 2))
    moved = batch.to(torch.device("meta"))
    assert all(getattr(moved, n).device.type == "meta" for n in TENSORS)
    assert (moved.label_weight, moved.digest) == (batch.label_weight, batch.digest)
