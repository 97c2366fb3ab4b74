"""One stream of several: each instance is one of a source's own stream.

N   instances of a call     K   sources     S   tokens in a row
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from forge_data.batch import Ragged
from forge_data.mixture import MIXTURE_VERSION, Mixture, Phase
from forge_data.protocols import Stream

__all__ = ["MixedStream"]


class MixedStream:
    """Instances of K streams in shares, endless or to the last epoch of the last source.

        stream = MixedStream({"web": web, "books": books}, [Phase(0, (3.0, 1.0))], {"books": 4})
        loader = Loader(stream, global_batch=16)

    `phases` have a weight for each stream in order; `max_epochs` ends single ones, whose shares the others take. Each
    stream's instances come in its own order, each once, whatever the others do: a stream must not depend on them, so give
    each a seed of its own (`seed_of`). Rows have `source`, the number of their stream. Cost beside the
    streams': O(N).

    Raises ValueError for weights that are no shares, and for streams whose rows differ in names, length or dtypes, or
    have ragged extras.
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
        self.mixture = Mixture(self._phases, limits)
        self._empty = self._agreed()

    @property
    def end(self) -> int | None:
        """Number of instances up to the last epoch of the last source; None without end."""
        return self.mixture.end

    def __len__(self) -> int:
        """Instances of one epoch of every stream."""
        return sum(len(stream) for stream in self.streams)

    def arrays(self, instance_ids: np.ndarray) -> dict[str, Any]:
        """Rows of these instances (N, ...), as the streams give them, and `source` (N,)."""
        sources, own = self.mixture.locate(np.asarray(instance_ids))
        out = {name: _rows_like(value, len(sources)) for name, value in self._empty.items()}
        for number in np.unique(sources):
            where = np.flatnonzero(sources == number)
            for name, value in self.streams[number].arrays(own[where]).items():
                if name != "source":
                    out[name][where] = value
        return {**out, "source": sources}

    def fingerprint(self) -> dict[str, str | int]:
        """Those of all streams, by name, and how they are mixed."""
        found: dict[str, str | int] = {"mixture.version": MIXTURE_VERSION}
        for phase in self._phases:
            shares = dict(zip(self.names, phase.weights))
            found[f"mixture.from_{phase.start}"] = json.dumps(shares)
        for name, stream in zip(self.names, self.streams):
            found |= {f"{name}.{key}": value for key, value in stream.fingerprint().items()}
            if name in self._epochs:
                found[f"{name}.max_epochs"] = self._epochs[name]
        return found

    def _agreed(self) -> dict[str, Any]:
        """Arrays without rows, alike in all streams but for their source."""
        nothing = np.empty(0, np.int64)
        found = [dict(stream.arrays(nothing)) for stream in self.streams]
        for arrays in found:
            arrays.pop("source", None)
        kinds = [{name: _kind(value) for name, value in arrays.items()} for arrays in found]
        for name, kind in zip(self.names, kinds):
            different = sorted(k for k in {*kind, *kinds[0]} if kind.get(k) != kinds[0].get(k))
            if different:
                raise ValueError(
                    f"sources {self.names[0]!r} and {name!r} must give rows alike, and differ in {different[0]}: "
                    f"{kinds[0].get(different[0], 'nothing')} and {kind.get(different[0], 'nothing')}; make them alike"
                )
        ragged = [name for name, value in found[0].items() if isinstance(value, Ragged)]
        if ragged:
            raise ValueError(
                f"extra {ragged[0]!r} has any number of entries for a row, which a mixture does not join; use one source"
            )
        return found[0]


def seed_of(seed: int, name: str) -> int:
    """A seed for the order of a source: another one for each name, whatever sources there are beside it."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _kind(value: Any) -> str:
    if isinstance(value, Ragged):
        return "ragged"
    return f"{value.dtype} {tuple(value.shape[1:])}".removeprefix("torch.")


def _rows_like(value: Any, rows: int) -> Any:
    """Rows of an array's, or a tensor's, shape and dtype, without values."""
    shape = (rows, *value.shape[1:])
    if isinstance(value, torch.Tensor):
        return torch.empty(shape, dtype=value.dtype)
    return np.empty(shape, value.dtype)
