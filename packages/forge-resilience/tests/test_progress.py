"""Progress: counters of a checkpoint, also of one that an earlier version saved."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from forge_resilience.policy import NonfiniteConfig, NumericsPolicy, SpikeConfig
from forge_resilience.progress import Progress
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")


def test_a_checkpoint_without_device_seconds_counts_the_ranks_of_now() -> None:
    state = Progress(NumericsPolicy(), 1, step=3, tokens=9, seconds=5.0).state_dict()
    del state["device_seconds"]
    progress = Progress(NumericsPolicy(), 4)
    progress.load_checks(state)
    progress.load_state_dict(state)
    assert progress.device_seconds == 20.0
    endless = state | {"device_seconds": math.inf}
    with rejects("progress", endless, "damaged"):
        progress.load_checks(endless)


def test_a_checkpoint_without_verdicts_undoes_later_ones() -> None:
    """Version 0.1 saved none; what was judged since is of steps that a rollback undid."""
    policy = NumericsPolicy(
        NonfiniteConfig("rollback", max_in_a_row=1), SpikeConfig("skip", window=2)
    )
    for loss in (1.0, 2.0, math.inf, math.inf):
        policy.judge(torch.tensor(loss), torch.tensor(1.0))
    policy.decide(policy.take().tolist(), 4)
    assert policy.state_dict()["in_a_row"] == 2
    Progress(policy).load_state_dict({"step": 2, "tokens": 8, "seconds": 1.0})
    new = {"rollbacks": 0, "in_a_row": 0, "bad_since": 0, "window": [[], []]}
    assert policy.state_dict() == new


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"step": -1}, "progress"),
        ({"tokens": True}, "progress"),
        ({"skipped_since_row": 0.5}, "progress.since_row"),
        ({"moe_since_row": [math.nan]}, "progress.since_row"),
        ({"policy": {}}, "policy"),
    ],
)
def test_values_that_no_run_has_saved_are_rejected(changes: dict[str, Any], key: str) -> None:
    progress = Progress(NumericsPolicy())
    with pytest.raises(ValueError, match=key) as caught:
        progress.load_checks(progress.state_dict() | changes)
    assert [p.key for p in caught.value.problems] == [key]  # type: ignore[attr-defined]
