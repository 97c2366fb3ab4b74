"""Workers for a sharded stream: each reads the rows of its own shards in every step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from forge_data.collate import as_ragged, scatter
from forge_data.places import owners
from forge_data.protocols import ShardedStream
from forge_data.reading import Steps
from forge_data.workers import WorkerLoss, Workers


class ShardWorkers:
    """`num_workers` processes that share out shards, not steps: a shard is read and tokenized by one of them.

    As `Workers`; a step is joined from their rows, one copy more.
    """

    def __init__(
        self,
        stream: ShardedStream,
        steps: Steps,
        num_workers: int,
        prefetch: int,
        timeout_seconds: float,
        lost: Callable[[WorkerLoss], None],
    ) -> None:
        self._stream, self._steps, self._step = stream, steps, 0
        each = max(1, prefetch // num_workers)
        self._workers: list[Workers] = []
        for number in range(num_workers):
            own = _OwnSteps(**vars(steps), stream=stream, number=number, count=num_workers)
            report = partial(_report, lost, number)
            self._workers.append(Workers(stream, own, 1, each, timeout_seconds, report))

    def fetch(self) -> dict[str, Any]:
        """The stream's arrays of the next step; raises the error of a worker that could not read them."""
        ids = self._steps.ids(self._step)
        owner = owners(self._stream, ids, len(self._workers))
        found = [(np.flatnonzero(owner == n), w.fetch()) for n, w in enumerate(self._workers)]
        self._step += 1
        like = {name: as_ragged(value) for name, value in found[0][1].items()}
        return scatter(len(ids), found, like)

    def close(self) -> None:
        """End and join the processes."""
        for workers in self._workers:
            workers.close()


@dataclass(frozen=True)
class _OwnSteps(Steps):
    """Of the instances of a step, those of one worker's shards."""

    stream: ShardedStream
    number: int
    count: int

    def ids(self, step: int) -> np.ndarray:
        ids = super().ids(step)
        return ids[owners(self.stream, ids, self.count) == self.number]


def _report(lost: Callable[[WorkerLoss], None], number: int, loss: WorkerLoss) -> None:
    lost(replace(loss, worker=number))
