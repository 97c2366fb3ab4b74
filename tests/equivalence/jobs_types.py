"""What a feature of a job is, for `jobs.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge_testing.runs import make_job
from forge_train import Callback

#: The axis that only experts can be spread over.
EP = frozenset({"ep"})
#: Four short steps with two evaluations, and two layers for two stages; a feature may say otherwise.
COMMON: dict[str, Any] = {
    "model.num_layers": 2,
    "train.steps": 4,
    "eval.every_steps": 2,
    "checkpoint.every_steps": 0,
    "sample.max_new_tokens": 0,
}


@dataclass(frozen=True)
class JobFeature:
    """A job, and what differs from it.

    job: writes `folder/job.toml`, with a global batch of 12 rows and fp32.
    flags: further keys after COMMON, for one process and for the ranks. None removes a key, also of a layout.
    micro_batch: rows of a micro-batch of the reference; None for the whole batch.
    same_partition: the reference takes the micro-batches of a reader, for losses of micro-batches.
    without: axes, or names of layouts, that refuse the feature or have no meaning for it.
    also: names of layouts that it must meet, beside every axis.
    callback: runs on the ranks, and fails the run if something is wrong inside.
    bound: relative error of weights and moments; biases that begin at 0 and squares of gradients have more than 1e-5.
    columns: columns of metrics that there must be. All that are no times nor memory must be equal (relative error 1e-5),
    rough_columns: but those that are ratios or small differences of sums (relative error 1e-3).
    """

    job: Callable[[Path], Path] = make_job
    flags: dict[str, Any] = field(default_factory=dict)
    micro_batch: int | None = None
    same_partition: bool = False
    without: frozenset[str] = frozenset()
    also: frozenset[str] = frozenset()
    callback: type[Callback] | None = None
    columns: tuple[str, ...] = ()
    bound: float = 1e-5
    rough_columns: tuple[str, ...] = ()

    def merged(self, *others: dict[str, Any]) -> dict[str, Any]:
        """All flags: COMMON, those of the feature, and further ones over them."""
        found = dict(COMMON)
        for flags in (self.flags, *others):
            found |= flags
        return {
            key: value for key, value in found.items() if self.flags.get(key, value) is not None
        }
