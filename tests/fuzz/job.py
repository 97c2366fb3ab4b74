"""A drawn job: the value of each axis, and its sizes. From it follow the TOML text, the files and the layouts."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """A configuration of the fuzzer.

    name      seed, number and attempt, such as "7.12.0"; all further numbers are drawn from it
    choice    the value of each axis that is not at its default
    sizes     numbers that several axes must fit: dims, rows, steps
    then      axes of the layout after a restart, where it is another one
    without   keys of the TOML text that the shrinker left out
    """

    name: str
    choice: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, Any] = field(default_factory=dict)
    then: Mapping[str, str] | None = None
    without: frozenset[str] = frozenset()

    def __getitem__(self, axis: str) -> str:
        """The value of an axis."""
        return self.choice.get(axis) or next(iter(axes()[axis].values))

    def has(self, axis: str) -> bool:
        """Whether an axis has another value than its default."""
        return axis in self.choice

    def pick(self, name: str, options: Sequence[T]) -> T:
        """One of the options, by the job's name and the name of the number only."""
        return random.Random(f"{self.name} {name}").choice(options)

    def with_value(self, axis: str, value: str) -> Job:
        """The job with another value of an axis."""
        choice = {name: found for name, found in self.choice.items() if name != axis}
        if value != next(iter(axes()[axis].values)):
            choice[axis] = value
        return replace(self, choice=choice)

    def with_size(self, name: str, value: Any) -> Job:
        """The job with another size."""
        return replace(self, sizes={**self.sizes, name: value})

    def keys(self) -> dict[str, Any]:
        """Dotted keys that the values set, without those of the layout; None removes a key that every job has."""
        found: dict[str, Any] = {}
        for name, axis in axes().items():
            if axis.area != "layout":
                keys = axis.values[self[name]]
                found |= keys(self) if callable(keys) else keys
        return found

    def is_without(self, key: str) -> bool:
        """Whether the shrinker left out the key, or a table that holds it."""
        return any(key == name or key.startswith(f"{name}.") for name in self.without)

    def layouts(self) -> list[dict[str, Any]]:
        """Keys of `parallel` for each attempt of the run: one, or two with a restart."""
        first = layout_keys(self.choice)
        if not self.has("restart"):
            return [first]
        return [first, first if self.then is None else layout_keys(self.then)]

    def to_json(self) -> str:
        """One line from which `from_json` makes the same job."""
        return json.dumps(
            {
                "name": self.name,
                "choice": dict(self.choice),
                "sizes": dict(self.sizes),
                "then": None if self.then is None else dict(self.then),
                "without": sorted(self.without),
            }
        )

    @staticmethod
    def from_json(text: str) -> Job:
        """The job of a line."""
        found = json.loads(text)
        return Job(**{**found, "without": frozenset(found["without"])})


@dataclass(frozen=True)
class Axis:
    """What a job can be on: values by name, the default first. A value is the keys that it sets, or a function that
    computes them from the job; `weights` are relative frequencies other than 1.

    against: values that the reference does not compute, which are compared with one process of Forge.
    """

    area: Literal[
        "model", "experts", "images", "data", "training", "optimizer", "layout", "computation",
        "events",
    ]  # fmt: skip
    values: Mapping[str, Any]
    weights: Mapping[str, float] = field(default_factory=dict)
    against: frozenset[str] = frozenset()


#: No keys, and an axis that begins with a value of that name.
NO: dict[str, Any] = {}
NONE = {"none": NO}


def table(table: str, /, **keys: Any) -> dict[str, Any]:
    """Keys of a table by their dotted names."""
    return {f"{table}.{key}": value for key, value in keys.items()}


@functools.cache
def axes() -> Mapping[str, Axis]:
    """All axes by name."""
    from tests.fuzz.axes import AXES  # its functions take jobs

    return AXES


def layout_keys(choice: Mapping[str, str]) -> dict[str, Any]:
    """Keys of `parallel` for the values of the axes of the layout."""
    found: dict[str, Any] = {"parallel.dp_shard": 1}
    for name, axis in axes().items():
        if axis.area == "layout":
            found |= axis.values[choice.get(name) or next(iter(axis.values))]
    return found


def size_of(keys: Mapping[str, Any], axis: str) -> int:
    """Ranks of an axis of a layout, such as "tp"."""
    return keys.get(f"parallel.{axis}", 1)


def readers_of(keys: Mapping[str, Any]) -> int:
    """Data ranks of a layout."""
    return size_of(keys, "dp_replicate") * size_of(keys, "dp_shard")


def world_of(keys: Mapping[str, Any]) -> int:
    """Ranks of a layout."""
    return readers_of(keys) * size_of(keys, "tp") * size_of(keys, "cp") * size_of(keys, "pp")
