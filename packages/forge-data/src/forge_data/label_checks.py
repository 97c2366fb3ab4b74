"""Whether the labels of a stream can be learned: there are any, and they are not the tokens of their own positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from forge_data._shared.problems import Problem, problems_of
from forge_data.batch import IGNORE, Batch
from forge_data.collate import batch_of
from forge_data.errors import InvalidData
from forge_data.loader import Loader
from forge_data.places import num_shards_of
from forge_data.protocols import Stream

__all__ = ["GuardedLoader", "has_label", "label_problem"]

_ENOUGH = 64  # labels before they are checked: fewer may be equal at random


def has_label(stream: Stream, count: int) -> bool:
    """Whether a label of the first `count` sequences has a weight above 0; also True if they cannot be read.

    Reads up to the first label, so usually one sequence.
    """
    begin = 0
    while begin < count:
        end = min(count, 2 * begin + 1)
        try:
            if batch_of(stream, range(begin, end)).label_weight:
                return True
        except (InvalidData, OSError, ValueError):
            return True
        begin = end
    return False


def label_problem(key: str, stream: Stream, count: int) -> Problem | None:
    """Why the loss of the first sequences of a stream would be a mean over nothing: none has a label. None otherwise.

    Streams that are read from front to back (`num_shards`) are not looked at. Cost as `has_label`.
    """
    count = 0 if num_shards_of(stream) else min(count, len(stream))
    if not count or has_label(stream, count):
        return None
    rule = "must have a label: all would be padding, masked or of weight 0"
    fix = "train on answers that fit into data.seq_len, with weights above 0"
    return Problem(key, "no_labels", f"{count} sequences", rule, fix)


class GuardedLoader(Loader):
    """A Loader whose first sequences are checked: `check(tokens, labels)` of int64 arrays (N,) with 64 labels or more.

    A ValueError of `check` becomes InvalidData below `key`. For sources whose labels are not those of a packing.
    """

    def __init__(
        self,
        *arguments: Any,
        check: Callable[[np.ndarray, np.ndarray], None],
        key: str = "",
        **keywords: Any,
    ) -> None:
        super().__init__(*arguments, **keywords)
        self._check, self._key = check, key
        self._seen: list[tuple[np.ndarray, np.ndarray]] | None = []  # None after the check

    def __next__(self) -> Batch:
        batch = super().__next__()
        if self._seen is None:
            return batch
        self._seen.append((batch.tokens.numpy().ravel(), batch.labels.numpy().ravel()))
        tokens, labels = map(np.concatenate, zip(*self._seen))
        if np.count_nonzero(labels != IGNORE) >= _ENOUGH:
            self._seen = None
            try:
                self._check(tokens, labels)
            except ValueError as error:
                raise InvalidData([p.under(self._key) for p in problems_of(error)]) from error
        return batch
