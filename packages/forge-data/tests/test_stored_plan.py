"""Rows by a plan equal the slow way; plans in the cache are made once, and again where they are damaged."""

from __future__ import annotations

import errno
import json
import pickle
import random
import tracemalloc
from functools import partial

import memory_sources
import numpy as np
import pytest
from memory_sources import Listed

from forge_data import (
    BuiltinCorpus,
    DataConfig,
    Loader,
    PackedStream,
    SourceConfig,
    TrainingSourceConfig,
    open_stream,
    open_training,
    packing,
)
from forge_data.packing_config import BestFitConfig, FirstFitConfig, PackingConfig
from forge_data.packing_plan import plan_rows
from forge_data.stored_plan import StoredPlan, open_plan
from forge_testing.damages import without_locks
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

POLICIES = ("first_fit", "best_fit")


random_documents = partial(memory_sources.random_documents, low=1)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FORGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "plans"


def entry(cache):
    (folder,) = (path for path in cache.iterdir() if path.is_dir())
    return folder


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seq_len", [1, 7, 16, 100])
def test_rows_equal_the_slow_way(policy, seq_len):
    documents = random_documents(seq_len)
    source = Listed(documents)
    plan = plan_rows(np.array(source.lengths), seq_len, policy)
    stream = PackedStream(source, seq_len, shuffle=False, plan=plan)
    assert len(stream) == plan.num_rows
    for row in range(len(stream)):
        want = {"tokens": [], "labels": [], "positions": [], "document_ids": []}
        for number, p in enumerate(range(plan.rows[row], plan.rows[row + 1])):
            document = documents[plan.documents[p]]
            for position, t in enumerate(range(plan.starts[p], plan.stops[p])):
                want["tokens"].append(document[t])
                want["labels"].append(document[t + 1] if t + 1 < len(document) else -100)
                want["positions"].append(position)
                want["document_ids"].append(number)
        left = seq_len - len(want["tokens"])
        pads = {"tokens": 0, "labels": -100, "positions": 0, "document_ids": -1}
        got = stream.instance(row)
        for name, values in want.items():
            assert got[name].tolist() == values + [pads[name]] * left, (row, name)
            assert got[name].dtype == np.int64


@pytest.mark.parametrize("policy", POLICIES)
def test_a_stored_plan_is_that_of_the_function_and_is_made_once(policy, cache, monkeypatch):
    source = Listed(random_documents(0))
    packing = PackingConfig(policy, **{policy: {"first_fit": FirstFitConfig, "best_fit": BestFitConfig}[policy](7)})  # fmt: skip
    stored = open_plan(source, 16, packing)
    plain = plan_rows(np.array(source.lengths), 16, policy, window=7)
    for name in ("rows", "documents", "starts", "stops"):
        assert getattr(stored, name).tolist() == getattr(plain, name).tolist()
    for name in ("digest", "num_cut", "num_tokens", "num_rows", "utilization"):
        assert getattr(stored, name) == getattr(plain, name), name
    monkeypatch.setattr("forge_data.stored_plan.plan_windows", None)
    assert open_plan(source, 16, packing).digest == stored.digest
    assert len(list(cache.iterdir())) == 2  # the plan and its lock


def _truncate(folder):
    path = folder / "stops.bin"
    path.write_bytes(path.read_bytes()[:-8])


def _flip(folder):
    path = folder / "documents.bin"
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.write_bytes(content)


def _of_other_version(folder):
    header = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps({**header, "version": 0}))


@pytest.mark.parametrize(
    "damage",
    [
        _truncate,
        _flip,
        _of_other_version,
        lambda folder: (folder / "plan.json").write_text("{"),
        lambda folder: (folder / "plan.json").write_text("[]"),
        lambda folder: (folder / "rows.bin").unlink(),
        lambda folder: (folder.parent / f".{folder.name}.tmp-1").mkdir(),
    ],
)
def test_a_damaged_plan_is_made_again(damage, cache, capsys):
    source = Listed(random_documents(0))
    good = open_plan(source, 16, PackingConfig("best_fit")).digest
    folder = entry(cache)
    damage(folder)
    assert open_plan(source, 16, PackingConfig("best_fit")).digest == good
    told = capsys.readouterr().err
    assert told.count("\n") == told.count(f" {folder} ") <= 1
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ["plan.json", "rows.bin", "documents.bin", "starts.bin", "stops.bin"]
    )


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FORGE_CACHE", str(tmp_path / "file"))
    with rejects("cache", str(tmp_path / "file/plans"), "unwritable"):
        open_plan(Listed([[1, 2]]), 16, PackingConfig("best_fit"))


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_F163_a_file_system_without_locks_is_warned_of_once(cache, monkeypatch, caplog, number):
    without_locks(monkeypatch, number)
    for seed in (0, 1):
        open_plan(Listed(random_documents(seed)), 16, PackingConfig("best_fit"))
    assert [r.getMessage().partition(":")[0] for r in caplog.records] == [str(cache)]


def test_a_pickled_plan_is_a_path():
    plan = open_plan(BuiltinCorpus("validation"), 64, PackingConfig("best_fit"))
    assert isinstance(plan, StoredPlan)
    sent = pickle.dumps(plan)
    assert len(sent) < 2000
    assert pickle.loads(sent).starts.tolist() == plan.starts.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["concatenate", *POLICIES])
@pytest.mark.parametrize("seed", range(2))
def test_the_union_over_ranks_is_one_sequence_for_every_policy(policy, seed):
    """Random histories of readers, batches, stops and workers."""
    draw = random.Random(seed)

    def stream():
        return open_stream(SourceConfig(split="validation"), 64, 3, PackingConfig(policy))

    n = len(stream())
    want = stream().arrays(np.arange(n + 40))
    state, cursor = None, 0
    while cursor < n + 8:
        world, micro = draw.randint(1, 8), draw.choice([1, 2, 3])
        batch = micro * draw.randint(8, 24)
        workers = draw.choice([0, 0, 0, 0, 2])
        loaders = [
            Loader(stream(), batch, r, world, workers if r == 0 else 0, micro_batch=micro)
            for r in range(world)
        ]
        seen = []
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
            found = next(loader)
            for row, i in enumerate(found.instance_ids.tolist()):
                if i >= 0:
                    seen.append(i)
                    for name in ("tokens", "labels", "positions", "document_ids"):
                        if i < n + 40:
                            assert (getattr(found, name)[row].numpy() == want[name][i]).all()
        assert sorted(seen) == list(range(cursor, cursor + batch))
        cursor += batch
        states = [loader.state_dict() for loader in loaders]
        assert all(other == states[0] for other in states)
        state = states[draw.randrange(world)]
        for loader in loaders:
            loader.close()


def test_a_resume_under_another_plan_is_rejected_with_the_difference():
    def stream(**packing):
        return open_stream(SourceConfig(split="validation"), 64, 3, PackingConfig(**packing))

    state = Loader(stream(), 4).state_dict()
    keys = ["packing.plan", "packing.policy"]
    with rejects("fingerprint", keys, "mismatch", where="concatenate_and_split-1"):
        Loader(stream(name="best_fit"), 4).load_state_dict(state)
    state = Loader(stream(name="best_fit"), 4).state_dict()
    with rejects("fingerprint", ["packing.policy"], "mismatch", where="65536"):
        Loader(stream(name="best_fit", best_fit=BestFitConfig(9)), 4).load_state_dict(state)


def test_each_source_of_a_mixture_has_a_plan_of_its_own(cache):
    text = TrainingSourceConfig(weight=2.0)
    held = TrainingSourceConfig(split="validation", weight=1.0)
    config = DataConfig(64, sources={"a": text, "b": held}, packing=PackingConfig("best_fit"))
    stream = open_training(config)
    assert [one.report()["cut_documents"] > 0 for one in stream.streams] == [True, True]
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 2
    assert stream.arrays(np.arange(30))["tokens"].shape == (30, 64)


@pytest.mark.parametrize(
    ("seq_len", "at_once"), [(1, 1 << 20), (7, 1 << 20), (64, 1 << 20), (7, 2), (64, 3)]
)
def test_F197_the_report_of_concatenated_rows_counts_split_documents(seq_len, at_once, monkeypatch):
    monkeypatch.setattr(packing, "_OFFSETS_AT_ONCE", at_once)
    documents = random_documents(1)
    stream = PackedStream(Listed(documents), seq_len)
    token, cut = 0, 0
    for document in documents:
        cut += token // seq_len != (token + len(document) - 1) // seq_len
        token += len(document)
    rows = -(-token // seq_len)
    want = {"rows": rows, "utilisation": round(token / rows / seq_len, 6), "cut_documents": cut}
    assert stream.report() == want


def test_a_plan_of_other_documents_is_rejected():
    plan = plan_rows(np.array([3, 4]), 8)
    with rejects("plan", 7, "mismatch"):
        PackedStream(Listed([[1, 2]]), 8, plan=plan)


def test_a_row_takes_the_memory_of_a_row():
    source = Listed([[1, 2, 3]] * 20_000)
    stream = PackedStream(source, 16, plan=open_plan(source, 16, PackingConfig("best_fit")))
    stream.instance(0)
    tracemalloc.start()
    stream.instance(10**12)
    assert tracemalloc.get_traced_memory()[1] < 20_000
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: PackingConfig("worst"), ("name", "worst", "unknown")),
        (lambda: BestFitConfig(0), ("window", 0, "range")),
        (
            lambda: PackingConfig("best_fit", first_fit=FirstFitConfig(9)),
            ("first_fit.window", 9, "foreign"),
        ),
    ],
)
def test_packings_that_cannot_be_are_rejected(make, problem):
    with rejects(*problem):
        make()


def test_inspect_compares_packings(tmp_path, capsys):
    pytest.importorskip("tyro")
    from forge_data.cli import main
    from forge_data.prepare import prepare

    (tmp_path / "a.txt").write_text("".join("word " * (i % 9) + "end\n" for i in range(99)))
    prepare([tmp_path / "a.txt"], tmp_path / "tokens", document="line")
    assert main(["inspect", str(tmp_path / "tokens"), "--seq_len", "32"]) == 0
    lines = capsys.readouterr().out.splitlines()[-3:]
    assert [line.split()[0] for line in lines] == ["concatenate", "first_fit", "best_fit"]
    assert all("documents cut" in line for line in lines)
