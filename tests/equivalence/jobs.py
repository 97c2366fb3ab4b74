"""Jobs of the runner with each feature, and the layouts that must train them as one process does.

`cells.py` compares models and their layouts; here whole runs are compared: data, loss, optimizer, evaluation and
metrics of `forge-train run`. A feature is an entry of FEATURES, a layout one of LAYOUTS. The tests run the cells of
`covering()`: every feature with every axis of a layout that it supports, and every layout with some feature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jobs_text
import jobs_vision
from jobs_types import EP, JobFeature


@dataclass(frozen=True)
class JobLayout:
    """Ranks, and the flags that arrange them. Flags outside `parallel` also hold for one process, except for the size
    of micro-batches, which is the partition of the batch."""

    world: int
    flags: dict[str, Any] = field(default_factory=dict)
    axes: frozenset[str] = frozenset()


@dataclass(frozen=True)
class JobCell:
    feature: str
    layout: str

    @property
    def parts(self) -> frozenset[Any]:
        """The pairs of the feature with an axis, the layout, and their pair where the feature names it."""
        also = FEATURES[self.feature].also & {self.layout}
        met = LAYOUTS[self.layout].axes | also
        return frozenset((self.feature, part) for part in met) | {self.layout}

    @property
    def rough_parts(self) -> frozenset[Any]:
        """The same with two kinds of axes: the pipeline, and all others."""
        pairs = [part for part in self.parts if not isinstance(part, str)]
        axes = frozenset((feature, "pp" if axis == "pp" else "other") for feature, axis in pairs)
        return axes | {self.layout}

    @property
    def name(self) -> str:
        return f"{self.feature}/{self.layout}"


def _pipe(world: int, schedule: str, *axes: str, layers: int = 2, **keys: Any) -> JobLayout:
    flags = {"parallel.pp": 2, "parallel.pp_schedule": schedule, "train.micro_batch": 3}
    flags |= {f"parallel.{key}": value for key, value in keys.items()}
    if layers != 2:
        flags["model.num_layers"] = layers
    return JobLayout(world, flags, frozenset({"pp", *axes}))


def _layout(world: int, *axes: str, micro_batch: int | None = None, **keys: Any) -> JobLayout:
    flags: dict[str, Any] = {f"parallel.{key}": value for key, value in keys.items()}
    if micro_batch is not None:
        flags["train.micro_batch"] = micro_batch
    return JobLayout(world, flags, frozenset(axes))


#: The vocabulary of the jobs is divisible by tp = 2 where the feature does not say otherwise.
LAYOUTS: dict[str, JobLayout] = {
    "fsdp": _layout(2, "dp_shard"),
    "fsdp accumulated": _layout(2, "dp_shard", micro_batch=3),
    "fsdp gathered": _layout(2, "dp_shard", reshard_after_forward=False),
    "fsdp recomputed": _layout(2, "dp_shard", recompute="full"),
    "fsdp compiled": _layout(2, "dp_shard", compile=True),
    "three readers": _layout(3, "dp_shard", micro_batch=2),
    "replicated": _layout(2, "dp_replicate", dp_replicate=2),
    "hsdp": _layout(4, "dp_replicate", "dp_shard", dp_replicate=2),
    "tp": _layout(2, "tp", tp=2),
    "tp whole": _layout(2, "tp", tp=2, sequence_parallel=False),
    "fsdp tp": _layout(4, "dp_shard", "tp", tp=2),
    "cp": _layout(2, "cp", cp=2),
    "cp ring": _layout(2, "cp", cp=2, cp_exchange="ring"),
    "tp cp": _layout(4, "tp", "cp", tp=2, cp=2),
    "pp gpipe": _pipe(2, "gpipe"),
    "pp 1f1b": _pipe(2, "1f1b"),
    "pp interleaved": _pipe(2, "interleaved_1f1b", layers=4),
    "pp zero bubble": _pipe(2, "interleaved_zero_bubble", layers=4),
    "pp zbv": _pipe(2, "zbv_zero_bubble", layers=4),
    "pp dualpipev": _pipe(2, "dualpipev", layers=4),
    "tp pp": _pipe(4, "1f1b", "tp", tp=2),
    "cp pp": _pipe(4, "1f1b", "cp", cp=2),
    "ep": _layout(2, "ep", ep=2),
    "hsdp ep": _layout(4, "ep", "dp_shard", ep=2),
    "pp ep": _pipe(4, "1f1b", "ep", ep=2),
}
FEATURES: dict[str, JobFeature] = {
    "plain": JobFeature(without=EP),
    **jobs_text.FEATURES,
    **jobs_vision.FEATURES,
}


def allowed(feature: str, layout: str) -> bool:
    without = FEATURES[feature].without
    return layout not in without and not without & LAYOUTS[layout].axes


def cells() -> Iterator[JobCell]:
    """Every feature in every layout that it supports."""
    for feature in FEATURES:
        yield from (JobCell(feature, layout) for layout in LAYOUTS if allowed(feature, layout))


def covering(
    chosen: Iterable[JobCell] | None = None,
    parts: Callable[[JobCell], frozenset[Any]] = lambda cell: cell.parts,
) -> list[JobCell]:
    """Few cells in which every part occurs that occurs in any, small ones first; a layout counts a quarter of a pair."""
    left = list(cells() if chosen is None else chosen)
    order = {cell: number for number, cell in enumerate(left)}
    missing = {part for cell in left for part in parts(cell)}
    found = []

    def gain(cell: JobCell) -> float:
        counts = (0.25 if isinstance(part, str) else 1.0 for part in parts(cell) & missing)
        return sum(counts) / LAYOUTS[cell.layout].world ** 0.5

    while missing:
        best = max(left, key=gain)
        missing -= parts(best)
        found.append(best)
    return sorted(found, key=lambda cell: order[cell])
