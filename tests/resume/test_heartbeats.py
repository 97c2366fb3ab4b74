"""A run tells a watcher where it is: phases and steps of each rank, and its saves in the background."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from forge_resilience import heartbeat
from forge_resilience.heartbeat import Heartbeat, read_heartbeats
from forge_testing import run_on_ranks
from forge_testing.runs import fit, make_job

pytestmark = pytest.mark.distributed


def entries_of_a_rank(job: Path, folder: Path) -> tuple[list[Any], list[str], Any]:
    """What the run entered, in the background too, and what is left to read at its end."""
    entered: list[Any] = []
    background: list[str] = []
    enter, begin = Heartbeat.enter, Heartbeat.background
    os.environ[heartbeat.FOLDER] = str(folder)

    def record(self: Heartbeat, phase: str, step: int | None = None) -> None:
        enter(self, phase, step)
        entered.append((phase, self._step))

    def record_background(self: Heartbeat, name: str) -> None:
        begin(self, name)
        background.append(name)

    Heartbeat.enter, Heartbeat.background = record, record_background  # type: ignore[method-assign]
    try:
        steps = {"train.steps": 4, "eval.every_steps": 2, "checkpoint.every_steps": 3}
        assert fit(job, {"metrics.console": "off", **steps}).code == 0
    finally:
        Heartbeat.enter, Heartbeat.background = enter, begin  # type: ignore[method-assign]
        for name in (heartbeat.FOLDER, "FORGE_HEARTBEAT_OWNER"):
            del os.environ[name]
    return entered, background, read_heartbeats(folder)


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_each_phase_of_a_run_is_entered(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    ranks = run_on_ranks(2, entries_of_a_rank, job, tmp_path / "beats")
    for entered, background, _ in ranks:
        assert entered == [
            *(("start", -1), ("load", -1), ("start", 0)),
            *(("data", 1), ("step", 1)),
            *(("data", 2), ("step", 2), ("evaluate", 2)),
            *(("data", 3), ("step", 3), ("save", 3)),
            *(("data", 4), ("step", 4), ("evaluate", 4), ("save", 4), ("exit", 4)),
        ]
        # once when it is made, then the save of step 3; that of step 4 is waited for
        assert background == ["", "save", "", ""]
    (one, two) = max((beats for _, _, beats in ranks), key=len)
    assert (one.rank, two.rank, one.entries) == (0, 1, 16)
    assert (two.phase, two.step, two.background) == ("exit", 4, "")

    again, _, _ = run_on_ranks(2, entries_of_a_rank, job, tmp_path / "more")[0]
    assert again[:3] == [
        ("start", -1),
        ("load", -1),
        ("start", 4),
    ]  # a finished run has nothing to do
