"""Division of a global batch among any number of data ranks."""

from __future__ import annotations

from dataclasses import dataclass

from forge_parallel._shared.problems import invalid
from forge_parallel.config import ParallelConfig
from forge_parallel.stages import next_allowed_count

__all__ = ["MicroBatches", "divide_batch"]

#: Rows that a rank computes, filler included, over an equal share: the limit in the search for a large micro-batch.
_TOLERATED = 1.1


@dataclass(frozen=True)
class MicroBatches:
    """A global batch in micro-batches of `size` rows, of which every reader runs `count`.

    Micro-batch j is rows `j * size .. (j + 1) * size - 1` of the global batch whatever the number of
    readers, so losses per micro-batch and capacities of experts do not depend on it. Reader r has the
    r-th run of them; the first readers have one more if they do not divide evenly. A reader with fewer than `count`
    runs micro-batches of filler behind its own, as collectives need every rank.
    """

    global_batch: int
    readers: int
    size: int
    count: int

    @property
    def filler(self) -> float:
        """Rows of filler over rows of data: 0.5 means that a step computes half as much again."""
        return self.count * self.size * self.readers / self.global_batch - 1.0

    @property
    def cost(self) -> str | None:
        """A line on what the filler costs; None without any."""
        if self.filler <= 0:
            return None
        return (
            f"{self.readers} readers share {self.global_batch} rows in micro-batches of {self.size}, {self.count} on "
            f"each: {self.filler:.1%} of the computation is added as filler"
        )


def divide_batch(
    config: ParallelConfig, global_batch: int, readers: int, micro_batch: int | None = None
) -> MicroBatches:
    """Divide `global_batch` rows among `readers` (`Layout.batch_size`) of a job.

        parts = divide_batch(config, global_batch=256, readers=12)       # 3 micro-batches of 8

    Without a `micro_batch` it is a reader's whole share, where shares are equal and the pipeline schedule
    can run them; otherwise the largest divisor of the global batch with which a reader computes at most a
    tenth more rows than an equal share, or failing that the fewest rows. The count is raised to
    the next one that the schedule allows. Raises ValueError for a micro_batch that does not divide the
    global batch, and for no rows or readers.
    """
    for name, count in (("global_batch", global_batch), ("readers", readers)):
        if count < 1:
            fix = "use the rows of a step and Layout.batch_size"
            raise invalid(name, "range", count, "must be at least 1", fix)

    def of_size(size: int) -> MicroBatches:
        shared = -(-global_batch // (size * readers))
        return MicroBatches(global_batch, readers, size, next_allowed_count(config, shared))

    if micro_batch is not None:
        if micro_batch < 1 or global_batch % micro_batch:
            fix = f"use {_divisors(global_batch, micro_batch)[-1]}"
            rule = f"must divide global_batch {global_batch}"
            raise invalid("micro_batch", "divides", micro_batch, rule, fix)
        return of_size(micro_batch)
    share = -(-global_batch // readers)
    whole = of_size(share) if global_batch % readers == 0 else None
    if whole and whole.count == 1:
        return whole
    limit = _TOLERATED * share
    possible = [of_size(size) for size in _divisors(global_batch, int(limit))]
    near = [p for p in possible if p.count * p.size <= limit]
    return near[-1] if near else min(reversed(possible), key=lambda p: p.count * p.size)


def _divisors(number: int, limit: int) -> list[int]:
    """Those up to `limit`, ascending; 1 at least."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({d for s in small for d in (s, number // s) if d <= max(limit, 1)})
