"""The order of training data in the most obvious form, written from docs/data-order.md only.

Files of a case: `sources/NAME.npz` of each source, `validation.npz` and `eval/NAME.npz`, with
`tokens` (all documents, one after another), `offsets` (documents + 1), and optionally

- `label_weights`, of conversations: the weight of each token as a label,
- `pieces`, of a set that streams: the number of texts of each piece. A text of white space only is
  a document of 0 tokens.

Sources with images have `rows/NAME.npz` instead (`rows/validation.npz`, `rows/eval.NAME.npz`; for
phases with samples of S tokens `rows/NAME@S.npz`): samples by index as the stream returned them,
and `epoch`, the number of samples of an epoch, if weights or `max_epochs` need it.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import packing
from .packing import derive
from .rows import Rows, Step
from .sources import Packed, Recorded, Source, Streamed, join, rows_of

Config = dict[str, Any]


# Mixtures


def shares(weights: list[float]) -> list[int]:
    """Return integers with the sum 2^30 in the proportions of the weights."""
    sums = list(itertools.accumulate(weights, initial=0.0))
    edges = [round(each / sums[-1] * 2**30) for each in sums]
    return [after - before for before, after in itertools.pairwise(edges)]


def sources_of_block(weights: list[float], b: int) -> list[int]:
    """Return the source of each sample of block b."""
    parts, size = shares(weights), 256
    while size * min(part for part in parts if part) < 2**31:
        size *= 2
    keys, c, before = [], 0, 0
    for k, part in enumerate(parts):
        c += part
        first, last = ((2 * c * blocks * size + 2**30) // 2**31 for blocks in (b, b + 1))
        m, before = last - first - before, last - first
        keys += [((r + 0.5) / m, k) for r in range(m)]
    return [k for _, k in sorted(keys)]


class Mixture:
    """The sources of a segment, and how many samples it has taken from each."""

    def __init__(self, sources: list[Source], limits: list[int | None]) -> None:
        self.sources, self.limits = sources, limits
        self.taken = [0 for _ in sources]

    def restart(self, weights: list[float]) -> None:
        """Count blocks from 0 again; sources that have given all their samples weigh 0."""
        ended = [
            limit is not None and taken >= limit for taken, limit in zip(self.taken, self.limits)
        ]
        self.weights = [0.0 if end else weight for end, weight in zip(ended, weights)]
        self.block, self.queue = 0, []

    def next(self) -> tuple[int, int] | None:
        """Return the source of the next sample and its number there; None where the data end."""
        while any(self.weights):
            if not self.queue:
                self.queue = sources_of_block(self.weights, self.block)
                self.block += 1
            k = self.queue[0]
            if self.limits[k] is None or self.taken[k] < self.limits[k]:
                self.queue.pop(0)
                self.taken[k] += 1
                return k, self.taken[k] - 1
            self.restart(self.weights)
        return None


# Phases


@dataclass
class Phase:
    """What is in force from the sample `start` on."""

    start: int
    segment: str | None  # name of the phase that began the segment, None for the first one
    weights: dict[str, float] | None  # None: those of the sources
    size: int
    batch: int
    lr_multiplier: float


def phases_of(job: Config) -> list[Phase]:
    """Return the phases in order; the first one has the values of the job."""
    data = job["data"]
    phase = Phase(0, None, None, data["seq_len"], job["train"]["global_batch"], 1.0)
    found, tokens = [phase], 0  # before the start of the last one

    def start_of(item: tuple[str, Config]) -> int:
        return item[1]["start_tokens"] or item[1]["start_instance"]

    for name, config in sorted(data["phases"].items(), key=start_of):
        start = config["start_instance"]
        if start is None:
            start = phase.start + -(-max(0, config["start_tokens"] - tokens) // phase.size)
        tokens += (start - phase.start) * phase.size
        size = config["seq_len"] or phase.size
        phase = Phase(
            start,
            name if size != phase.size else phase.segment,
            config["weights"] or phase.weights,
            size,
            config["global_batch"] or phase.batch,
            config["lr_multiplier"],
        )
        found.append(phase)
    return found


class Data:
    """The data of a job: steps for training, and samples for evaluations.

    `skipped` are windows [first, last) of sample indices that are left out. Weights of labels have
    `dtype`.
    """

    def __init__(
        self,
        job: Config,
        folder: Path,
        readers: int,
        skipped: Sequence[Sequence[int]] = (),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.job, self.folder, self.readers = job, Path(folder), readers
        self.skipped, self.dtype = skipped, dtype
        self.phases = phases_of(job)

    def _source(self, config: Config, name: str, size: int, seed: int) -> Source:
        """Open a source; `name` is that of its file, such as sources/books."""
        rows = self.folder / "rows" / name.removeprefix("sources/").replace("/", ".")
        suffix = "" if size == self.job["data"]["seq_len"] else f"@{size}"
        recorded = rows.with_name(f"{rows.name}{suffix}.npz")
        if recorded.exists():
            return Recorded(dict(np.load(recorded)))
        file = dict(np.load(self.folder / f"{name}.npz"))
        if "pieces" in file:
            return Streamed(config, file, size, seed)
        return Packed(config, self.job["data"]["packing"], file, size, seed)

    # Training

    def _mixture(self, phase: Phase, before: list[Mixture]) -> Mixture:
        """Begin the segment of a phase; `before` are the segments before it."""
        data = self.job["data"]
        seed = self.job["run"]["seed"] if data["seed"] is None else data["seed"]
        if phase.segment is not None:
            seed = derive(seed, f"phase {phase.segment}")

        sources: list[Source] = []
        limits: list[int | None] = []
        for k, (name, config) in enumerate(data["sources"].items()):
            own = derive(seed, name) if len(data["sources"]) > 1 else seed
            source = self._source(config, f"sources/{name}", phase.size, own)
            limit = config["max_epochs"]
            if limit is not None:
                for mixture in before:  # epochs that it began count
                    limit -= -(-mixture.taken[k] // mixture.sources[k].n)
                limit = max(0, limit) * source.n
            sources.append(source)
            limits.append(limit)
        return Mixture(sources, limits)

    def _weights(self, phase: Phase, sources: list[Source]) -> list[float]:
        """Return the weight of each source in a phase."""
        configs = self.job["data"]["sources"]
        if phase.weights is not None:
            return [phase.weights.get(name, 0.0) for name in configs]
        if len(sources) == 1:
            return [1.0]
        weights = [
            float(source.n) if config["weight"] is None else config["weight"]
            for config, source in zip(configs.values(), sources, strict=True)
        ]
        power = 1 / self.job["data"]["temperature"]
        return [(each / max(weights)) ** power if each else 0.0 for each in weights]

    def _samples(self) -> Iterator[tuple[int, Phase, Rows | None]]:
        """Yield (index, phase, sample) until the data end; None for a sample that is left out."""
        mixtures: list[Mixture] = []
        segment, weights = "", []
        for index in itertools.count():
            phase = [each for each in self.phases if each.start <= index][-1]
            if phase.segment != segment:
                mixtures.append(self._mixture(phase, mixtures))
                segment, weights = phase.segment, []
            before, weights = weights, self._weights(phase, mixtures[-1].sources)
            if weights != before:
                mixtures[-1].restart(weights)

            taken = mixtures[-1].next()
            if taken is None:
                return
            sample = None
            if not any(first <= index < end for first, end in self.skipped):
                k, j = taken
                numbers = {"ids": torch.tensor([index]), "source": torch.tensor([k])}
                sample = replace(mixtures[-1].sources[k].sample(j), **numbers)
            yield index, phase, sample

    def _division(self, batch: int) -> tuple[int, int]:
        """Return m and C: samples of a micro-batch, and micro-batches of each reader in a step."""
        pp, schedule = self.job["parallel"]["pp"], self.job["parallel"]["pp_schedule"]

        def count(m: int) -> int:
            found = -(-batch // (m * self.readers))
            if pp > 1:
                if schedule == "1f1b":
                    found = max(found, pp)
                elif schedule == "dualpipev":
                    found = max(found, 2 * pp)
                elif schedule.startswith("interleaved_"):
                    while found % max(1, found // pp):
                        found += 1
            return found

        m = self.job["train"]["micro_batch"]
        if m is not None:
            return m, count(m)
        u = -(-batch // self.readers)
        if batch % self.readers == 0 and count(u) == 1:
            return u, 1
        divisors = [m for m in range(1, batch + 1) if batch % m == 0 and (m <= 1.1 * u or m == 1)]
        cheap = [m for m in divisors if m * count(m) <= 1.1 * u]
        m = max(cheap) if cheap else min(divisors, key=lambda m: (m * count(m), -m))
        return m, count(m)

    def _step(self, phase: Phase, samples: list[Rows], tokens: int) -> Step:
        """Divide the samples of a step to readers and micro-batches."""
        m, count = self._division(phase.batch)
        padding = rows_of(packing.arrays([], [], None, phase.size))
        readers, first = [], 0
        for reader in range(self.readers):
            micro_batches = phase.batch // m // self.readers
            micro_batches += reader < phase.batch // m % self.readers
            own = samples[first : first + micro_batches * m]  # fewer at the end of a segment
            own = own + [padding] * (count * m - len(own))
            first += micro_batches * m
            readers.append([join(own[i : i + m], self.dtype) for i in range(0, len(own), m)])

        ids = [int(each.ids) for each in samples]
        digest = hashlib.sha256(np.array(ids, "<i8").tobytes()).hexdigest()[:16]
        return Step(readers, ids, digest, tokens, phase.lr_multiplier)

    def steps(self) -> Iterator[Step]:
        """Yield what each step reads, until `max_epochs` end the data."""
        ends = {b.start for a, b in itertools.pairwise(self.phases) if a.segment != b.segment}
        samples: list[Rows] = []
        phase, tokens = self.phases[0], 0
        for index, now, sample in self._samples():
            if sample is not None:
                if not samples:
                    phase = now
                samples.append(sample)
                tokens += phase.size
            if samples and (len(samples) == phase.batch or index + 1 in ends):
                yield self._step(phase, samples, tokens)
                samples = []

    # Held-out data

    def validation(self, name: str | None = None) -> list[Rows]:
        """Return the samples of [data.validation], or of a set of [eval.sets], one in each Rows."""
        data, evaluation = self.job["data"], self.job["eval"]
        if name is None:
            config, file, count = data["validation"], "validation", evaluation["sequences"]
        else:
            config, file = evaluation["sets"][name], f"eval/{name}"
            count = config["sequences"] or evaluation["sequences"]
        source = self._source(config, file, data["seq_len"], 0)
        found = []
        for i in range(count if source.n is None else min(count, source.n)):
            numbers = {"ids": torch.tensor([i]), "source": torch.tensor([0])}
            found.append(join([replace(source.sample(i), **numbers)], self.dtype))
        return found
