"""One stream of several: each instance is one of a source's own stream.

N   instances of a call     K   sources     S   tokens in a row
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from forge_data._shared.problems import invalid
from forge_data.batch import Ragged
from forge_data.collate import as_ragged, scatter
from forge_data.mixture import MIXTURE_VERSION, Mixture, Phase
from forge_data.places import PLACES, num_shards_of, sharded
from forge_data.protocols import Stream

__all__ = ["MixedStream", "seed_of"]


class MixedStream:
    """Instances of K streams in shares, endless or to the last epoch of the last source.

        stream = MixedStream({"web": web, "books": books}, [Phase(0, (3.0, 1.0))], {"books": 4})
        loader = Loader(stream, global_batch=16)

    `phases` have a weight for each stream in order; `max_epochs` ends single ones, whose shares the others take. Each
    stream's instances come in its own order, each once, whatever the others do: a stream must not depend on them, so give
    each a seed of its own (`seed_of`). Rows have `source`, the number of their stream. Cost beside the
    streams': O(N).

    Where some streams give `weights` of labels, rows of the others have ones, which multiply their losses exactly.

    A ragged extra that only some streams give has no entries in rows of the others: text goes with pictures.

    Raises ValueError for weights that are no shares, and for streams whose rows differ in other names, length or dtypes.
    """

    def __init__(
        self,
        streams: Mapping[str, Stream],
        phases: Sequence[Phase],
        max_epochs: Mapping[str, int] | None = None,
    ) -> None:
        self.names = tuple(streams)
        self.streams = tuple(streams.values())
        self._epochs = dict(max_epochs or {})
        limits = [
            self._epochs[name] * len(stream) if name in self._epochs else None
            for name, stream in streams.items()
        ]
        self._phases = tuple(Phase(*phase) for phase in phases)
        self.mixture = Mixture(self._phases, limits, self.names)
        self._first_shards = np.cumsum([0, *map(num_shards_of, self.streams)])  # (streams + 1,)
        self.num_shards = int(self._first_shards[-1])
        self._empty = self._agreed()
        if self.num_shards:
            self._empty[PLACES] = np.empty((0, 3), np.int64)

    @property
    def end(self) -> int | None:
        """Number of instances up to the last epoch of the last source; None without end."""
        return self.mixture.end

    @property
    def warnings(self) -> list[str]:
        """Those of streams that have any, such as the number of conversations that are too long."""
        return self._lines("warnings")

    @property
    def source_lines(self) -> list[str]:
        """What each source is."""
        return self._lines("source_lines")

    def _lines(self, name: str) -> list[str]:
        pairs = zip(self.names, self.streams)
        return [f"{own}: {line}" for own, stream in pairs for line in getattr(stream, name, ())]

    def __len__(self) -> int:
        """Instances of one epoch of every stream."""
        return sum(len(stream) for stream in self.streams)

    def arrays(self, instance_ids: np.ndarray) -> dict[str, Any]:
        """Rows of these instances (N, ...), as the streams give them, and `source` (N,)."""
        sources, own = self.mixture.locate(np.asarray(instance_ids))
        rows = self._rows_by_source(sources, own)
        return {**scatter(len(sources), rows, self._empty), "source": sources}

    def _rows_by_source(
        self, sources: np.ndarray, own: np.ndarray
    ) -> Iterator[tuple[np.ndarray, dict[str, Any]]]:
        """Where the rows of each source are among (N,), and its arrays."""
        for number in np.unique(sources):
            where = np.flatnonzero(sources == number)
            found = dict(self.streams[number].arrays(own[where]))
            found.pop("source", None)
            if "weights" in self._empty:
                found.setdefault("weights", 1.0)
            if self.num_shards:
                first = np.array([self._first_shards[number], 0, 0])
                found[PLACES] = np.asarray(found[PLACES]) + first if PLACES in found else -1
            yield where, found

    def shards_of(self, instance_ids: np.ndarray) -> np.ndarray:
        """The shard (N,) of each instance, counted through all streams; -1 in a stream without shards."""
        sources, own = self.mixture.locate(np.asarray(instance_ids))
        shards = np.full(len(sources), -1)
        for number in np.unique(sources):
            stream, where = sharded(self.streams[number]), np.flatnonzero(sources == number)
            if stream is not None:
                shards[where] = stream.shards_of(own[where]) + self._first_shards[number]
        return shards

    def load_places(self, table: np.ndarray) -> None:
        """Begin the shards of all streams at their places (shards, 2)."""
        for stream, first, last in zip(
            map(sharded, self.streams), self._first_shards, self._first_shards[1:]
        ):
            if stream is not None:
                stream.load_places(table[first:last])

    def epochs_begun(self, position: int) -> dict[str, int]:
        """Epochs of each source with `max_epochs` of which the first `position` instances have a row."""
        position = position if self.end is None else min(position, self.end)
        counts = self.mixture.counts(position) if position else [0] * len(self.names)
        found = zip(self.names, self.streams, counts)
        return {n: -(-count // len(own)) for n, own, count in found if n in self._epochs}

    def names_of(self, instance_ids: np.ndarray) -> list[str]:
        """The names of the sources of these instances, each once, in order of the sources."""
        return [self.names[number] for number in np.unique(self.mixture.locate(instance_ids)[0])]

    def fingerprint(self) -> dict[str, str | int]:
        """Those of all streams, by name, and how they are mixed. ValueError where two would be one by their names."""
        found: dict[str, str | int] = {"mixture.version": MIXTURE_VERSION}
        for phase in self._phases:
            shares = dict(zip(self.names, phase.weights))
            found[f"mixture.from_{phase.start}"] = json.dumps(shares)
        for name, stream in zip(self.names, self.streams):
            own = {**stream.fingerprint()}
            if name in self._epochs:
                own["max_epochs"] = self._epochs[name]
            add_apart(found, f"source {name!r}", {f"{name}.{key}": v for key, v in own.items()})
        return found

    def _agreed(self) -> dict[str, Any]:
        """Arrays without rows, alike in all streams but for their source."""
        nothing = np.empty(0, np.int64)
        found = [
            {name: as_ragged(value) for name, value in stream.arrays(nothing).items()}
            for stream in self.streams
        ]
        for arrays in found:
            arrays.pop("source", None)
            arrays.pop(PLACES, None)

        given = {
            name: value
            for arrays in found
            for name, value in arrays.items()
            if name == "weights" or isinstance(value, Ragged)
        }
        for arrays in found:
            for name, value in given.items():
                arrays.setdefault(name, value)

        kinds = [{name: _kind(value) for name, value in arrays.items()} for arrays in found]
        for name, kind in zip(self.names, kinds):
            different = sorted(k for k in {*kind, *kinds[0]} if kind.get(k) != kinds[0].get(k))
            if different:
                kinds_of = [k.get(different[0], "nothing") for k in (kinds[0], kind)]
                rule = f"must give the same arrays, and {different[0]} is {kinds_of[0]} and {kinds_of[1]}"
                fix = "make them the same"
                raise invalid("sources", "mismatch", [self.names[0], name], rule, fix)
        return found[0]


def add_apart(found: dict[str, str | int], called: str, more: Mapping[str, str | int]) -> None:
    """Add entries to a fingerprint; ValueError if one is there already, as a resume would then not see it change."""
    both = sorted({*found} & {*more})
    if both:
        rule = f"must not be in the fingerprint of {called}, as something else of the data has it"
        raise invalid("fingerprint", "duplicate", both[0], rule, "rename it")
    found |= more


def seed_of(seed: int, name: str) -> int:
    """A seed for the order of a source: another one for each name, whatever sources there are beside it."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def source_names(stream: Any, instance_ids: np.ndarray) -> list[str]:
    """The names of the sources of sample indices (N,) of any stream: in a mixture as configured, else that of the class."""
    if hasattr(stream, "names_of"):
        names: list[str] = stream.names_of(instance_ids)
        return names
    return [type(getattr(stream, "source", stream)).__name__]


def _kind(value: Any) -> str:
    if isinstance(value, Ragged):
        return f"ragged {_kind(value.values)}"
    return f"{value.dtype} {tuple(value.shape[1:])}".removeprefix("torch.")
