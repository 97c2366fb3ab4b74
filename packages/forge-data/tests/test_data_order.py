"""Rows, labels, order, proportions and resumes of random data sections, against a slow simulation.

The simulation has documents as lists of ids. It makes the rows of each source token by token, and deals a step to readers
one micro-batch at a time. In which order rows of an epoch come, and which source a row is from, is not simulated: each row
must come once an epoch, epochs must differ, and counts must follow the weights at every row.
"""

from __future__ import annotations

import json
import math
import random
import struct
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from forge_data import (
    DataConfig,
    Loader,
    PhaseConfig,
    Stream,
    TrainingSourceConfig,
    batch_of,
    open_training,
)
from forge_data.kinds import BorderConfig
from forge_data.packing_config import BestFitConfig, FirstFitConfig, PackingConfig
from forge_data.tokens.writer import TokenWriter

#: Tokens, labels, positions and document ids of a row.
Row = tuple[tuple[int, ...], ...]
Documents = list[list[int]]
END, BEGIN = 1, 2


class Source(NamedTuple):
    documents: Documents
    weight: float | None
    max_epochs: int | None


class Segment(NamedTuple):
    """Rows from `start` on; `weights` by name, None for those of the sources. `part` counts changes of `seq_len`."""

    start: int
    seq_len: int
    weights: dict[str, float] | None
    part: int


# ---- sources: kind, documents, files


def draw_documents(draw: random.Random, seq_len: int, first_id: int) -> Documents:
    """Documents of ids that no other document has."""
    kind, count = draw.choice(("tiny", "mixed", "long", "one", "exact")), draw.randint(1, 40)
    sizes = {
        "tiny": [draw.randint(1, 3) for _ in range(2 * count)],
        "mixed": [draw.randint(1, 3 * seq_len) for _ in range(count)],
        "long": [draw.randint(4 * seq_len, 20 * seq_len)] + [1] * draw.randint(0, 5),
        "one": [draw.randint(1, 5 * seq_len)],
        "exact": [draw.choice((seq_len, 2 * seq_len, seq_len + 1)) for _ in range(count)],
    }[kind]
    offsets = np.cumsum([first_id, *sizes]).tolist()
    return [list(range(a, b)) for a, b in pairwise(offsets)]


def write_source(kind: str, documents: Documents, folder: Path) -> tuple[dict[str, Any], Documents]:
    """Keys of a source whose files have these documents, and the documents as they are read."""
    folder.mkdir()
    if kind == "tokens":
        writer = TokenWriter(folder, 1 << 16, None)
        for ids in documents:
            writer.add([ids])
        writer.finish()
        return {"name": kind, "path": str(folder)}, documents
    if kind == "megatron":
        write_megatron(folder, documents)
        return {"name": kind, "path": str(folder / "text.idx")}, documents
    if kind == "npy":
        documents = [[*ids, END] for ids in documents]
        np.save(folder / "a.npy", np.array([i for ids in documents for i in ids], "<i4"))
        border = {"npy": BorderConfig(eos_id=END)}
        return {"name": kind, "path": str(folder / "a.npy"), **border}, documents
    documents = [[BEGIN, *ids] for ids in documents]
    ids = np.array([i for ids in documents for i in ids], "<u2")
    half = len(ids) // 2  # two files are one source
    for name, part in (("train_0.bin", ids[:half]), ("train_1.bin", ids[half:])):
        if len(part):
            (folder / name).write_bytes(part.tobytes())
    return {
        "name": "nanogpt",
        "path": str(folder),
        "nanogpt": BorderConfig(bos_id=BEGIN),
    }, documents


def write_megatron(folder: Path, documents: Documents) -> None:
    """megatron-core's `.idx` and `.bin` of int32, a sequence for each document."""
    lengths = [len(ids) for ids in documents]
    (folder / "text.bin").write_bytes(b"".join(np.array(ids, "<i4").tobytes() for ids in documents))
    with (folder / "text.idx").open("wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, len(lengths), len(lengths) + 1))
        file.write(np.array(lengths, "<i4").tobytes())
        file.write(np.array([4 * sum(lengths[:i]) for i in range(len(lengths))], "<i8").tobytes())
        file.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())


# ---- rows of a source, token by token


def slow_rows(documents: Documents, seq_len: int, packing: PackingConfig) -> list[Row]:
    """The rows of an epoch."""
    if packing.name == "concatenate":
        tokens = [(d, i) for d, ids in enumerate(documents) for i in range(len(ids))]
        places = [tokens[at : at + seq_len] for at in range(0, len(tokens), seq_len)]
    else:
        places = []
        for first in range(0, len(documents), packing.window):
            window = documents[first : first + packing.window]
            for pieces in slow_plan([len(ids) for ids in window], seq_len, packing.name):
                places.append([(first + d, i) for d, a, b in pieces for i in range(a, b)])
    return [slow_row(documents, place, seq_len) for place in places]


def slow_plan(lengths: list[int], seq_len: int, policy: str) -> list[list[tuple[int, int, int]]]:
    """Pieces (document, first token, token after the last) of each row: full rows of long documents, then the rest."""
    rows, rest, room = [], [], []
    for d, length in enumerate(lengths):
        cut = length - length % seq_len
        rows += [[(d, at, at + seq_len)] for at in range(0, cut, seq_len)]
        if cut < length:
            rest.append((d, cut, length))
    if policy == "best_fit":
        rest.sort(key=lambda piece: piece[1] - piece[2])  # the longest first; sort is stable

    filled: list[list[tuple[int, int, int]]] = []
    waiting: list[int] = []  # rows, of which that comes first which was filled longest ago
    for d, a, b in rest:
        fits = [row for row in waiting if room[row] >= b - a]
        if not fits:
            filled.append([])
            room.append(seq_len)
            waiting.append(len(filled) - 1)
            fits = waiting[-1:]
        chosen = min(fits, key=room.__getitem__) if policy == "best_fit" else fits[0]
        filled[chosen].append((d, a, b))
        room[chosen] -= b - a
        if policy == "best_fit":
            waiting.remove(chosen)
            waiting.append(chosen)
    return rows + [sorted(row) for row in filled]


def slow_row(documents: Documents, places: list[tuple[int, int]], seq_len: int) -> Row:
    """A row of these tokens (document, index), and padding after them."""
    tokens, labels, positions, numbers = [], [], [], []
    for at, (d, i) in enumerate(places):
        new = at == 0 or places[at - 1][0] != d
        tokens.append(documents[d][i])
        labels.append(documents[d][i + 1] if i + 1 < len(documents[d]) else -100)
        positions.append(0 if new else positions[-1] + 1)
        numbers.append((numbers[-1] + new) if numbers else 0)
    pad = seq_len - len(places)
    filled = ((tokens, 0), (labels, -100), (positions, 0), (numbers, -1))
    return tuple(tuple(values) + (value,) * pad for values, value in filled)


# ---- a random data section


class Drawn(NamedTuple):
    config: DataConfig
    sources: dict[str, Source]
    segments: list[Segment]


def draw_section(draw: random.Random, folder: Path) -> Drawn:
    """A data section of 1 to 4 sources, up to 2 phases and any packing; ValueError for one that is rejected."""
    seq_len, count = draw.choice((1, 2, 3, 7, 8, 16, 33)), draw.choice((1, 1, 2, 3, 4))
    weighted, first_id = count > 1 and draw.random() < 0.6, 10
    sources, tables = {}, {}
    for number in range(count):
        name = f"s{number}"
        drawn = draw_documents(draw, seq_len, first_id)
        first_id = drawn[-1][-1] + 5
        kind = draw.choice(("tokens", "megatron", "npy", "nanogpt"))
        keys, documents = write_source(kind, drawn, folder / name)
        weight = draw.choice((1.0, 2.0, 0.5, 0.01 + draw.random(), 10.0, 0.001, 0.0))
        weight = None if not weighted else max(weight, 0.5 * (number == 0))
        epochs = draw.choice((None, None, 1, 2, 3))
        sources[name] = Source(documents, weight, epochs)
        tables[name] = TrainingSourceConfig(weight=weight, max_epochs=epochs, **keys)

    name = draw.choice(("concatenate", "concatenate", "best_fit", "first_fit"))
    window, own = draw.choice((3, 1 << 16)), {}
    if name != "concatenate":
        own = {name: (BestFitConfig if name == "best_fit" else FirstFitConfig)(window)}
    packing = PackingConfig(name, **own)
    temperature = draw.choice((1.0, 1.0, 2.0, 0.5, 5.0)) if count > 1 else 1.0

    phases, at, by_rows = {}, 0, draw.random() < 0.5
    for number in range(draw.choice((0, 0, 1, 2))):
        at += draw.randint(1, 60)
        keys = {"start_instance": at}
        if not by_rows:
            keys = {"start_tokens": at * seq_len - draw.randint(0, seq_len - 1)}
        if count > 1 and draw.random() < 0.8:
            named = [name for name in sources if draw.random() < 0.7] or ["s0"]
            keys["weights"] = {name: draw.choice((1.0, 3.0, 0.25)) for name in named}
        if draw.random() < 0.3:
            keys["seq_len"] = draw.choice((4, 5, seq_len + 1))
        if len(keys) == 1:
            keys["lr_multiplier"] = 0.5
        phases[f"p{number}"] = PhaseConfig(**keys)
    config = DataConfig(
        seq_len, sources=tables, phases=phases, temperature=temperature, packing=packing
    )
    return Drawn(config, sources, segments_of(config))


def segments_of(config: DataConfig) -> list[Segment]:
    """Where each phase begins: at the first row after its tokens."""
    found, tokens = [Segment(0, config.seq_len, None, 0)], 0  # tokens before the last segment
    for phase in config.phases.values():
        before, start = found[-1], phase.start_instance
        if start is None:
            start = before.start
            while tokens + (start - before.start) * before.seq_len < phase.start_tokens:
                start += 1
        tokens += (start - before.start) * before.seq_len
        seq_len = phase.seq_len or before.seq_len
        part = before.part + (seq_len != before.seq_len)
        found.append(Segment(start, seq_len, phase.weights or before.weights, part))
    return found


# ---- the stream, one row after another


class Simulation:
    """Accepts rows one by one: `accept(source, row)` raises AssertionError for one that must not come next."""

    def __init__(self, drawn: Drawn) -> None:
        self.drawn, self.names = drawn, list(drawn.sources)
        self.at = 0  # the next row
        self.part = -1
        self.begun = dict.fromkeys(self.names, 0)  # epochs, over all parts
        self.key: Any = None
        self._enter()

    @property
    def segment(self) -> Segment:
        return [s for s in self.drawn.segments if s.start <= self.at][-1]

    def _enter(self) -> None:
        """Rows of another length begin a new epoch of each source."""
        if self.segment.part == self.part:
            return
        self.part = self.segment.part
        rows = {
            name: slow_rows(source.documents, self.segment.seq_len, self.drawn.config.packing)
            for name, source in self.drawn.sources.items()
        }
        self.rows = {name: Counter(found) for name, found in rows.items()}
        self.left = {name: Counter() for name in self.names}  # of the epoch
        self.order: dict[str, list[Row]] = {name: [] for name in self.names}  # since the part began

    def weights(self) -> dict[str, float]:
        """Weights of the sources that are not at their end."""
        sources, temperature = self.drawn.sources, self.drawn.config.temperature
        if self.segment.weights is not None:
            found = {name: self.segment.weights.get(name, 0.0) for name in self.names}
        else:
            given = {
                name: float(self.rows[name].total()) if source.weight is None else source.weight
                for name, source in sources.items()
            }
            most = max(given.values())
            found = {name: (given[name] / most) ** (1 / temperature) for name in self.names}
        for name, source in sources.items():
            if source.max_epochs and self.begun[name] >= source.max_epochs and not self.left[name]:
                found[name] = 0.0
        return found

    @property
    def ended(self) -> bool:
        self._enter()
        return not any(self.weights().values())

    def accept(self, source: int, row: Row) -> None:
        self._enter()
        name, weights = self.names[source], self.weights()
        assert weights[name] > 0.0, (self.at, name, weights)

        # each row once an epoch
        if not self.left[name]:
            self.left[name] = self.rows[name].copy()
            self.begun[name] += 1
        assert self.left[name][row] > 0, (self.at, name, row)
        self.left[name] -= Counter([row])
        self.order[name].append(row)
        count = self.rows[name].total()
        if count > 7 and not self.left[name]:
            last, before = self.order[name][-count:], self.order[name][-2 * count : -count]
            assert last != before, (self.at, name)  # each epoch has an order of its own

        # counts follow the weights from where these began
        if (key := (self.segment, weights)) != self.key:
            self.key, self.counts = key, dict.fromkeys(self.names, 0)
        self.counts[name] += 1
        total, given = sum(weights.values()), sum(self.counts.values())
        for other in self.names:
            fair = weights[other] / total * given
            assert abs(self.counts[other] - fair) <= 1.5 + len(self.names) / 2, (self.at, other)
        self.at += 1


def row_of(batch: Any, number: int) -> Row:
    arrays = (batch.tokens, batch.labels, batch.positions, batch.document_ids)
    return tuple(tuple(array[number].tolist()) for array in arrays)


def check_stream(drawn: Drawn, stream: Stream, most: int) -> list[tuple[int, Row]]:
    """Source and row of up to `most` samples, each of which the simulation accepts."""
    simulation, found = Simulation(drawn), []
    while len(found) < most and not simulation.ended:
        batch = batch_of(stream, [len(found)])
        found.append((int(batch.source[0]), row_of(batch, 0)))
        simulation.accept(*found[-1])
    end = getattr(stream, "end", None)
    assert simulation.ended == (end == len(found)), (end, len(found))
    return found


# ---- readers


def readers_ids(ids: list[int], global_batch: int, micro_batch: int, world: int) -> list[list[int]]:
    """What each reader has of the samples of a step, -1 for padding: whole micro-batches in order, the first readers one
    more. A step that a part ends has fewer samples."""
    count = global_batch // micro_batch
    own: list[list[int]] = [[] for _ in range(world)]
    at = 0
    for reader in range(world):
        for _ in range(count // world + (reader < count % world)):
            own[reader] += ids[at : at + micro_batch]
            at += micro_batch
    most = math.ceil(count / world) * micro_batch
    return [found + [-1] * (most - len(found)) for found in own]


def check_readers(
    drawn: Drawn, stream: Stream, rows: list[tuple[int, Row]], draw: random.Random
) -> None:
    """Readers of random numbers, batches and stops see the rows in order, without the windows that are skipped."""
    todo, state = list(range(len(rows))), None
    part_of = [[s for s in drawn.segments if s.start <= i][-1].part for i in todo]
    while todo:
        world, micro_batch = draw.randint(1, 8), draw.choice((1, 2, 3))
        global_batch = micro_batch * draw.randint(1, 5)
        loaders = []
        for rank in range(world):
            ahead = draw.choice((0, 0, 0, 2))
            loaders.append(
                Loader(stream, global_batch, rank, world, micro_batch=micro_batch, prefetch=ahead)
            )
            if state is not None:
                loaders[-1].load_state_dict(json.loads(json.dumps(state)))
        for _ in range(draw.randint(1, 6)):
            # a step ends where rows have another length
            ids = [i for i in todo[:global_batch] if part_of[i] == part_of[todo[0]]]
            if ids == todo and len(ids) < global_batch:
                todo = []  # fewer rows than a step has
                break
            check_step(loaders, readers_ids(ids, global_batch, micro_batch, world), rows)
            todo = todo[len(ids) :]
        if todo and draw.random() < 0.3:
            first = todo[0] + draw.randint(0, 3)
            last = first + draw.randint(0, 5)
            todo = [i for i in todo if not first <= i <= last]
            for loader in loaders:
                loader.skip(first, last)
        states = [loader.state_dict() for loader in loaders]
        assert all(other == states[0] for other in states)
        state = draw.choice(states)
        for loader in loaders:
            loader.close()


def check_step(loaders: list[Loader], wanted: list[list[int]], rows: list[Any]) -> None:
    """Each reader has the wanted samples, and padding after them."""
    batches = [next(loader) for loader in loaders]
    assert [batch.instance_ids.tolist() for batch in batches] == wanted
    assert len({batch.digest for batch in batches}) == 1
    for batch in batches:
        for number, i in enumerate(batch.instance_ids.tolist()):
            if i >= 0:
                assert (int(batch.source[number]), row_of(batch, number)) == rows[i], i
            else:
                tokens, labels, _, documents = map(set, row_of(batch, number))
                assert (tokens, labels, documents) == ({0}, {-100}, {-1})


def check_section(seed: int, folder: Path) -> bool:
    """Whether the section of this seed is one; AssertionError where it is not read as simulated."""
    draw = random.Random(seed)
    try:
        drawn = draw_section(draw, folder)
        stream = open_training(drawn.config, seed=seed)
    except ValueError as error:
        problems = {(p.key.rpartition(".")[2], p.code) for p in error.problems}
        shares = {(f"s{number}", "range") for number in range(4)} | {("weight", "range")}
        starts = {
            (f"p{number}", code) for number in range(2) for code in ("same_start", "no_change")
        }
        assert problems <= shares | starts, problems
        return False
    rows = check_stream(drawn, stream, draw.randint(20, 300))
    check_readers(drawn, stream, rows, draw)
    return True


@pytest.mark.parametrize(
    "seeds",
    [
        range(6),
        pytest.param(range(6, 36), marks=[pytest.mark.slow, pytest.mark.lane("ci")]),
        pytest.param(range(36, 336), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_random_data_is_read_as_in_the_slow_simulation(
    seeds: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORGE_CACHE", str(tmp_path / "cache"))
    accepted = 0
    for seed in seeds:
        (folder := tmp_path / str(seed)).mkdir()
        accepted += check_section(seed, folder)
    assert accepted >= 0.8 * len(seeds)
