"""One stream of several, one after another: each part has rows of another length."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from forge_data._shared.problems import invalid
from forge_data.mixed_stream import add_apart, source_names
from forge_data.protocols import Stream

__all__ = ["Part", "PhasedStream", "part_at", "parts_of"]


class Part:
    """Instances `start .. end - 1` (`end` None: to the last) are those of a stream from its first on."""

    def __init__(self, name: str, stream: Stream, start: int = 0, end: int | None = None) -> None:
        self.name, self.stream, self.start, self.end = name, stream, start, end

    def __len__(self) -> int:
        """Instances of an epoch."""
        return len(self.stream)

    def arrays(self, instance_ids: np.ndarray) -> Mapping[str, Any]:
        """Rows of these instances, as the run counts them."""
        return self.stream.arrays(np.asarray(instance_ids) - self.start)

    def fingerprint(self) -> dict[str, str | int]:
        """That of the stream."""
        return self.stream.fingerprint()

    def names_of(self, instance_ids: np.ndarray) -> list[str]:
        """The names of the sources of these instances."""
        return source_names(self.stream, np.asarray(instance_ids) - self.start)


class PhasedStream:
    """Streams one after another, the last to its end. No batch has rows of two parts: a `Loader` cuts it.

        stream = PhasedStream([("", short, 0), ("long", long, 10_000)])

    Each has its name and its first instance. Raises ValueError unless these rise from 0.
    """

    def __init__(self, parts: Sequence[tuple[str, Stream, int]]) -> None:
        starts = [start for _, _, start in parts]
        if starts[:1] != [0] or sorted({*starts}) != starts:
            rule = "must begin with instance 0 and rise"
            raise invalid("parts", "order", starts, rule, "put them in order")
        ends = [*starts[1:], None]
        self.parts = [Part(*part, end) for part, end in zip(parts, ends)]
        self._starts = starts

    @property
    def end(self) -> int | None:
        """Number of instances up to the last; None without end."""
        for part in self.parts:
            own = getattr(part.stream, "end", None)
            if own is not None and (part.end is None or part.start + own < part.end):
                return part.start + int(own)
        return None

    @property
    def warnings(self) -> list[str]:
        """What the parts have to say to a user, those behind the first under their names."""
        return [
            f"phase {part.name}: {line}" if part.name else line
            for part in self.parts
            for line in getattr(part.stream, "warnings", ())
        ]

    @property
    def source_lines(self) -> list[str]:
        """What each source is, which all parts read."""
        return list(getattr(self.parts[0].stream, "source_lines", ()))

    def __len__(self) -> int:
        """Instances of an epoch of the first part."""
        return len(self.parts[0])

    def part_at(self, instance: int) -> Part:
        """The part that an instance belongs to."""
        return self.parts[bisect_right(self._starts, instance) - 1]

    def arrays(self, instance_ids: np.ndarray) -> Mapping[str, Any]:
        """Rows of instances of one part, for `batch_of`; a `Loader` reads the part itself.

        ValueError for those of several, which have rows of two lengths.
        """
        ids = np.asarray(instance_ids)
        parts = (
            {id(self.part_at(i)): self.part_at(i) for i in (ids.min(), ids.max())}
            if len(ids)
            else {}
        )
        if len(parts) > 1:
            found, rule = (int(ids.min()), int(ids.max())), "must be instances of one part"
            raise invalid("instance_ids", "mixed", found, rule, "read them apart")
        return next(iter(parts.values()), self.parts[0]).arrays(ids)

    def fingerprint(self) -> dict[str, str | int]:
        """Those of all parts; the first one's as they would be without the others."""
        found = self.parts[0].fingerprint()
        for part in self.parts[1:]:
            named = {f"from_{part.start}.{k}": v for k, v in part.fingerprint().items()}
            add_apart(found, f"the phase from row {part.start}", named)
        return found


def parts_of(stream: Stream) -> list[Part]:
    """The parts of any stream, in order."""
    return stream.parts if isinstance(stream, PhasedStream) else [Part("", stream)]


def part_at(stream: Stream, instance: int) -> Part:
    """The part of any stream that an instance belongs to: all of it, but for a PhasedStream."""
    return stream.part_at(instance) if isinstance(stream, PhasedStream) else Part("", stream)
