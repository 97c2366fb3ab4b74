"""TrainingCheckpoints: saves that fail, are made good and are announced, and the way back."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from torch import nn

from forge_ckpt import SaveEvent, Store
from forge_ckpt.training import TrainingCheckpoints


class Disk:
    """A store whose saves in the background end as `outcomes` says."""

    def __init__(self) -> None:
        self.outcomes: list[SaveEvent] = []
        self.error: OSError | None = None

    def save(self, step: int, *_: object) -> None:
        self.step = step

    def poll(self) -> list[SaveEvent]:
        found, self.outcomes = self.outcomes, []
        return found

    def wait(self) -> None:
        if self.error is not None:
            raise self.error


def test_a_failed_save_is_made_good_and_the_last_one_allowed_ends_the_run() -> None:
    disk = Disk()
    own = TrainingCheckpoints(disk, {}, max_failures=2)  # type: ignore[arg-type]
    own.save(3, wait=False)
    assert own.last_step == 3
    assert own.announce(-1) == []

    disk.error = OSError(errno.ENOSPC, "full")
    disk.outcomes = [SaveEvent("failed", 3, 1.0, "full", 1)]
    assert own.settle() == []
    assert own.wants_retry
    assert own.last_step == -1
    own.save(4, wait=False)
    assert not own.wants_retry

    disk.outcomes = [SaveEvent("failed", 4, 1.0, "full", 2)]
    with pytest.raises(OSError, match="full"):
        own.settle()
    assert not own.wants_retry  # the second in a row waits for its time

    disk.error, disk.outcomes = None, [SaveEvent("committed", 5, 1.0)]
    own.save(5, wait=False)
    assert own.settle() == [5]
    assert own.announce(5) == []


def test_the_way_back_is_the_newest_step_up_to_the_wanted_one(tmp_path: Path) -> None:
    model, loaded = nn.Linear(2, 2), list[int]()
    with Store(tmp_path, keep_last=9) as store:
        own = TrainingCheckpoints(store, {"model": model}, after_load=loaded.append)
        assert not own.go_back(9, 9)
        for step in (2, 4, 6):
            nn.init.constant_(model.weight, step)
            own.save(step, wait=True)
            assert own.settle() == [step]
        assert own.go_back(5, 3)
        assert loaded == [2]
        torch.testing.assert_close(model.weight, torch.full((2, 2), 2.0))
        assert store.steps() == [2]
        assert own.last_step == own.committed == 2
        assert not own.go_back(9, 9, first=3)
        assert own.go_back(9, 1)  # the oldest, where none is old enough
