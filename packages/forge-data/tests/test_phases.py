"""Phases: one stream after another, whoever reads it, and where each begins."""

from __future__ import annotations

import random
import sys
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from memory_sources import begin_life, end_life, skip

from forge_data import DataConfig, Loader, PhaseConfig, TrainingSourceConfig, open_training, phases
from forge_data.ledger import Ledger
from forge_data.phase_schedule import PhaseSchedule
from forge_data.phased_stream import PhasedStream
from forge_data.phases import phase_segments
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")


class Numbers:
    """Row i of width w is i."""

    def __init__(self, name, width):
        self.name, self.width = name, width

    def __len__(self):
        return 10

    def arrays(self, ids):
        rows = np.repeat(np.asarray(ids, np.int64)[:, None], self.width, 1)
        zeros = np.zeros_like(rows)
        return {"tokens": rows, "labels": rows, "positions": zeros, "document_ids": zeros}

    def fingerprint(self):
        return {"name": self.name}


BORDERS = (0, 23, 31, 80)


def phased():
    streams = [Numbers(name, width) for name, width in zip("abcd", (2, 3, 5, 2))]
    return PhasedStream([(s.name, s, start) for s, start in zip(streams, BORDERS)])


def test_parts_that_do_not_begin_at_0_are_rejected():
    with rejects("parts", [5], "order"):
        PhasedStream([("a", Numbers("a", 2), 5)])


def want_of(instance):
    part = sum(instance >= border for border in BORDERS) - 1
    return instance, (2, 3, 5, 2)[part], instance - BORDERS[part]


SLOW = [pytest.mark.slow, pytest.mark.lane("ci")]


@pytest.mark.parametrize(
    "seed", [0, 1, 2, *(pytest.param(seed, marks=SLOW) for seed in range(3, 10))]
)
def test_the_union_over_ranks_is_one_sequence_across_boundaries(seed):
    """Random histories of readers, batches of changing size, workers, stops and skipped windows."""
    draw = random.Random(seed)
    state, got, windows = None, [], []
    while not got or got[-1][0] < 100:
        world, micro = draw.randint(1, 5), draw.choice([1, 2, 3])
        batch = micro * draw.randint(1, 6)
        ahead = draw.choice([0, 0, 2])
        workers = draw.choice([0, 0, 0, 2])
        options = {"micro_batch": micro, "prefetch": max(ahead, workers)}
        loaders = [
            Loader(phased(), batch, r, world, workers if r == 0 else 0, **options)
            for r in range(world)
        ]
        begin_life(loaders, state)
        for step in range(draw.randint(1, 3)):
            if step == 1 and draw.random() < 0.5:
                for loader in loaders:
                    loader.rebatch(2 * batch, micro)
            rows = []
            for loader in loaders:
                found = next(loader)
                assert len(found) == loader.num_micro_batches * micro
                own = found.instance_ids >= 0
                width = found.tokens.size(1)
                assert {loader.filler(1).tokens.size(1)} <= {2, 3, 5}
                rows += [
                    (int(i), width, int(row[0]))
                    for i, row in zip(found.instance_ids[own], found.tokens[own])
                ]
            assert len({width for _, width, _ in rows}) == 1
            got += sorted(rows)
        if draw.random() < 0.4:
            first = loaders[0].next_instance + draw.randint(0, 6)
            skip(loaders, windows, first, draw.randint(0, 9))
        state = end_life(loaders, draw)
    left = [i for i in range(400) if not any(a <= i <= b for a, b in windows)]
    assert got == [want_of(i) for i in left[: len(got)]]


@pytest.mark.parametrize("seed", range(5))
def test_positions_are_the_inverse_of_ids(seed):
    draw = random.Random(seed)
    ledger = Ledger()
    for _ in range(draw.randint(0, 4)):
        first = draw.randint(0, 60)
        ledger.add(first, first + draw.randint(0, 9))
    left = [i for i in range(100) if not any(a <= i <= b for a, b in ledger.windows)]
    for instance in range(90):
        assert ledger.position(instance) == sum(i < instance for i in left)


def test_its_arrays_are_of_one_part_and_its_fingerprint_of_all():
    stream = phased()
    with rejects("instance_ids", (22, 23), "mixed"):
        stream.arrays(np.array([22, 23]))
    assert stream.arrays(np.array([30, 23]))["tokens"].tolist() == [[7, 7, 7], [0, 0, 0]]
    assert stream.fingerprint()["from_31.name"] == "c"
    assert stream.fingerprint()["name"] == "a"


def config(**phases):
    sources = {"a": TrainingSourceConfig(), "b": TrainingSourceConfig(split="validation")}
    return DataConfig(16, sources=sources, phases={n: PhaseConfig(**p) for n, p in phases.items()})


def test_phases_begin_with_the_first_row_after_their_tokens():
    data = config(
        long={"start_tokens": 1000, "seq_len": 64},
        end={"start_tokens": 2000, "weights": {"b": 1.0}},
        back={"start_tokens": 3000, "seq_len": 16, "lr_multiplier": 0.5},
    )
    found = phase_segments(data)
    assert [s.start for s in found] == [0, 63, 63 + 16, 63 + 32]
    assert [s.tokens for s in found] == [0, 1008, 2032, 3056]
    assert [s.seq_len for s in found] == [16, 64, 64, 16]
    assert [s.lr_multiplier for s in found] == [1.0, 1.0, 1.0, 0.5]
    assert [s.weights for s in found] == [None, None, {"b": 1.0}, {"b": 1.0}]
    by_rows = config(long={"start_instance": 63, "seq_len": 64})
    assert phase_segments(by_rows)[1].tokens == 1008


def test_another_length_begins_a_new_epoch_in_another_order():
    data = config(
        long={"start_tokens": 1000, "seq_len": 64},
        end={"start_tokens": 2000, "weights": {"b": 1.0}},
    )
    stream = open_training(data, 0)
    assert [part.start for part in stream.parts] == [0, 63]
    only = open_training(config(), 0)
    ids = np.arange(63)
    assert (stream.arrays(ids)["tokens"] == only.arrays(ids)["tokens"]).all()
    assert stream.arrays(np.arange(63, 70))["tokens"].shape == (7, 64)
    assert {*stream.arrays(np.arange(79, 90))["source"].tolist()} == {1}
    again = config(
        long={"start_instance": 63, "seq_len": 32}, back={"start_instance": 70, "seq_len": 16}
    )
    part = open_training(again, 0).parts[2]
    first = part.arrays(np.arange(70, 90))["tokens"]
    assert not (first == only.arrays(np.arange(20))["tokens"]).all()


@pytest.mark.parametrize(
    ("phases", "problem"),
    [
        ({"a": {}}, ("start_tokens", ..., "one_of")),
        ({"a": {"start_tokens": 4, "start_instance": 2}}, ("start_tokens", ..., "one_of")),
        ({"a": {"start_instance": 4}}, ("phases.a", ..., "no_change")),
        ({"a": {"start_tokens": 4, "seq_len": 16}}, ("phases.a", ..., "no_change")),
        ({"a": {"start_tokens": 64, "seq_len": 0}}, ("seq_len", 0, "range")),
        (
            {"a": {"start_tokens": 33, "seq_len": 8}, "b": {"start_tokens": 34, "seq_len": 4}},
            ("phases.b", ..., "same_start"),
        ),
        (
            {"a": {"start_tokens": 33, "seq_len": 8}, "b": {"start_instance": 34, "seq_len": 4}},
            ("phases", ..., "mixed_starts"),
        ),
    ],
)
def test_phases_without_an_effect_are_rejected(phases, problem):
    with rejects(*problem):
        config(**phases)


@pytest.mark.parametrize("temperature", [5e-324, 1e-3, 1.0])
def test_F174_a_source_too_small_for_the_others_is_named_at_any_temperature(temperature):
    sources = {"a": TrainingSourceConfig(), "b": TrainingSourceConfig(split="validation")}
    rows = [len(open_training(DataConfig(16, sources={n: s}))) for n, s in sources.items()]
    share = (rows[1] / rows[0]) ** (1.0 / temperature)
    data = DataConfig(16, sources=sources, temperature=temperature)
    if share > 2**-19:
        assert set(open_training(data).arrays(np.arange(60))["source"]) == {0, 1}
        return
    with rejects("sources.b.weight", sys.float_info.min, "range"):
        open_training(data)


@pytest.mark.parametrize(("most", "left"), [(1, 0), (2, 0), (3, 1), (4, 2)])
def test_F148_no_token_comes_more_often_than_max_epochs_through_a_phase_of_other_rows(most, left):
    """One and a half epochs of rows of 64 tokens, then rows of 96, as long as there are any."""
    length = len(open_training(DataConfig(64, sources={"a": TrainingSourceConfig(max_epochs=1)})))
    start = 3 * length // 2 if most != 1 else length // 2
    data = DataConfig(
        64,
        sources={"a": TrainingSourceConfig(max_epochs=most, weight=1.0), "b": TrainingSourceConfig(split="validation", weight=1e-4)},
        phases={"long": PhaseConfig(start_instance=start, seq_len=96)},
    )  # fmt: skip
    stream = open_training(data)
    source = stream.parts[0].stream.streams[0].source
    seen = np.zeros(source.num_tokens, np.int64)
    for part, rows in zip(stream.parts, (start, 3 * length)):
        numbers, own = part.stream.mixture.locate(np.arange(rows))
        packed = part.stream.streams[0]
        before = seen.copy()
        for row in packed.rows(own[numbers == 0]):
            seen[row * packed.seq_len : (row + 1) * packed.seq_len] += 1
    assert seen.max() <= most
    assert set(seen - before) == {left}


def test_F148_a_phase_of_other_rows_without_epochs_left_is_the_end():
    data = DataConfig(
        64,
        sources={"a": TrainingSourceConfig(max_epochs=1)},
        phases={"long": PhaseConfig(start_instance=10, seq_len=96)},
    )
    assert open_training(data).end == 10


@pytest.mark.parametrize("name", ["Stretch", "stretches"])
def test_names_of_before_are_read_with_a_warning(name: str) -> None:
    with pytest.warns(DeprecationWarning, match="[pP]hase"):
        old = getattr(phases, name)
    assert old is {"Stretch": phases.PhaseSegment, "stretches": phases.phase_segments}[name]


def course_of(draw: random.Random) -> PhaseSchedule:
    """Four phases, of which some have other rows or batches."""
    phases = {}
    for i, begin in enumerate(sorted(draw.sample(range(1, 300), 4))):
        keys: dict[str, Any] = {"start_instance": begin, "lr_multiplier": 0.5 + i}
        if draw.random() < 0.6:
            keys["seq_len"] = draw.choice([8, 16, 32])
        if draw.random() < 0.6:
            keys["global_batch"] = draw.choice([4, 12, 36])
        phases[f"p{i}"] = PhaseConfig(**keys)
    sources = {"a": TrainingSourceConfig()}
    return PhaseSchedule(DataConfig(seq_len=16, sources=sources, phases=phases), 12)


@pytest.mark.lane("quick")
@pytest.mark.parametrize("seed", range(20))
def test_F207_steps_tokens_rows_and_flops_are_those_of_a_walk(seed: int) -> None:
    draw = random.Random(seed)
    course = course_of(draw)
    windows = [[40, 55], [150, 151]] if draw.random() < 0.5 else []
    ledger, cursor, tokens, cursors, reached, flops = Ledger(windows), 0, 0, [0], [0], [0]
    per_token = [100 + s.seq_len for s in course.segments]
    borders = [b.start for a, b in pairwise(course.segments) if a.seq_len != b.seq_len]
    for step in range(1, 60):
        first = int(ledger.ids([cursor])[0])
        segment = [s for s in course.segments if s.start <= first][-1]
        assert course.at(first) == segment
        ids = ledger.ids(range(cursor, cursor + course.batch_of(segment)))
        rows = min([len(ids), *(int((ids < b).sum()) for b in borders if b > first)])
        own = rows * segment.seq_len
        if not windows:
            assert course.at_step(step) == (segment, tokens, own)
            assert course.steps_of(tokens + 1) == course.steps_of(tokens + own) == step
            assert course.rows_of(step) == cursor + rows
            of_first = course.batch_of(course.segments[0]) * course.segments[0].seq_len
            length = -(-(tokens + own) // of_first) if course.changes_batch else step
            assert course.scheduled_steps(step) == length
        cursor, tokens = cursor + rows, tokens + own
        cursors.append(cursor)
        flops.append(flops[-1] + own * per_token[course.segments.index(segment)])
        reached.append(tokens)
        assert course.tokens(cursor, windows) == tokens
        assert course.cursor(tokens, windows) == cursor
        back = draw.randint(0, step)
        assert course.steps_back(cursor, back, windows) == cursors[step - back]
        # F207: from any step on, with what is left out
        assert course.flops(tokens, per_token, windows) == flops[-1]
        left = tokens - reached[step - back]
        if back:
            assert course.steps_of(left, cursors[step - back], windows) == back
            assert course.steps_of(left - own + 1, cursors[step - back], windows) == back


@pytest.mark.lane("quick")
@pytest.mark.parametrize("seed", range(20))
def test_steps_back_count_from_where_another_global_batch_began(seed: int) -> None:
    """A rollback must leave out the rows of the bad step, and of no other."""
    draw = random.Random(seed)
    course = course_of(draw)
    begin = cursor = draw.randint(1, 99)  # a step of another batch ended there
    cursors, borders = (
        [begin],
        [b.start for a, b in pairwise(course.segments) if a.seq_len != b.seq_len],
    )
    for step in range(1, 40):
        rows = course.batch_of(course.at(cursor))
        cursor += min([rows, *(border - cursor for border in borders if border > cursor)])
        cursors.append(cursor)
        back = draw.randint(0, step)
        assert course.steps_back(cursor, back, begin=begin) == cursors[step - back]
