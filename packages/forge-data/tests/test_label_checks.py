"""Labels that cannot be learned: none at all, and those that nobody shifted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from forge_data import InvalidData
from forge_data._shared.problems import invalid
from forge_data.batch import IGNORE
from forge_data.run_checks import GuardedLoader, has_label
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")


class Rows:
    """Sequences of 8 tokens, whose labels are those from `first` on; `read` counts sequences."""

    def __init__(self, first: int) -> None:
        self.first, self.read = first, 0

    def __len__(self) -> int:
        return 100

    def arrays(self, ids: np.ndarray) -> Mapping[str, Any]:
        self.read += len(ids)
        tokens = np.arange(8) + 8 * np.asarray(ids, np.int64)[:, None]
        labels = np.where(np.asarray(ids)[:, None] >= self.first, tokens + 1, IGNORE)
        zeros = np.zeros_like(tokens)
        return {"tokens": tokens, "labels": labels, "positions": zeros, "document_ids": zeros}

    def fingerprint(self) -> dict[str, str | int]:
        return {}


@pytest.mark.parametrize(("first", "found"), [(0, True), (9, True), (10, False)])
def test_labels_are_looked_for_up_to_the_first(first: int, found: bool) -> None:
    rows = Rows(first)
    assert has_label(rows, 10) == found
    assert rows.read == (1 if first == 0 else 10)


def test_rows_that_cannot_be_read_are_left_to_the_loader() -> None:
    class Broken(Rows):
        def arrays(self, ids: np.ndarray) -> Mapping[str, Any]:
            raise OSError("gone")

    assert has_label(Broken(0), 10)


def test_the_first_labels_are_checked_once_there_are_enough() -> None:
    seen: list[int] = []

    def check(tokens: np.ndarray, labels: np.ndarray) -> None:
        seen.append(int((labels != IGNORE).sum()))
        if len(seen) > 1 or (labels[labels != IGNORE] == tokens[labels != IGNORE] + 1).all():
            raise invalid("labels", "unshifted", 3, "must be shifted")

    loader = GuardedLoader(Rows(4), 2, check=check, key="sources")
    for _ in range(5):  # of 64 labels, after two steps without any
        next(loader)
    with rejects("sources.labels", 3, "unshifted", InvalidData):
        next(loader)
    assert seen == [64]
    next(loader)  # judged once
    assert seen == [64]
