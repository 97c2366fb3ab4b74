"""A run whose node or device is broken ends with code 71 before the first step, and its journal names the node."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from forge_resilience import ExitCode
from forge_resilience.health import broken_nodes
from forge_testing import run_on_ranks
from forge_testing.probes import wrong_results
from forge_testing.runs import Fitted, fit, make_job
from forge_train import read_run

pytestmark = pytest.mark.distributed


def fit_on_nodes(job: Path, from_probe: int, options: dict[str, Any]) -> Fitted:
    """One rank a node; the device of rank 1 computes wrong from its so-manieth probe on."""
    rank = dist.get_rank()
    os.environ["SLURMD_NODENAME"] = f"n{rank + 1}"
    probes = iter(range(1, 100))
    try:
        with wrong_results(lambda: rank == 1 and next(probes) >= from_probe):
            return fit(job, {"metrics.console": "off", "train.steps": 6, **options})
    finally:
        del os.environ["SLURMD_NODENAME"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("from_probe", "options", "step"),
    [(1, {}, 0), (2, {"health.every_steps": 2}, 2), (1, {"health.at_start": False}, 6)],
    ids=["first", "later", "never"],
)
def test_a_device_that_computes_wrong_ends_the_run_and_its_node_is_known(
    tmp_path: Path, from_probe: int, options: dict[str, Any], step: int
) -> None:
    job = make_job(tmp_path)
    fitted = run_on_ranks(3, fit_on_nodes, job, from_probe, options)
    code = ExitCode.DONE if step == 6 else ExitCode.HARDWARE
    assert [(f.code, f.step) for f in fitted] == [(code, step)] * 3
    events = [e for e in read_run(tmp_path / "run").events if e["event"] in ("health", "save")]
    if step == 6:
        assert {e["event"] for e in events} == {"save"}
        return
    (event,) = events  # and no save
    assert (event["step"], event["rank"], event["nodes"]) == (step, 1, ["n2"])
    assert "rank 1 on n2: computing: a wrong product" in fitted[0].problems[0]
    assert broken_nodes(tmp_path / "run/events.jsonl") == ["n2"]


@pytest.mark.slow
def test_a_warning_is_an_event_and_the_run_goes_on(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    options = {"health.action": "warn", "health.every_steps": 3}
    fitted = run_on_ranks(3, fit_on_nodes, job, 1, options)
    assert [(f.code, f.step) for f in fitted] == [(0, 6)] * 3
    events = [e for e in read_run(tmp_path / "run").events if e["event"] == "health"]
    assert [e["step"] for e in events] == [0, 3, 6]
