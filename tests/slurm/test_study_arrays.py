"""The arrays that `forge-train sweep --slurm` writes, on a real Slurm: preempted elements end with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.slurm.cluster import wait_until

from forge_lab import read_study
from forge_testing import forge_train
from forge_testing.processes import last_step
from forge_testing.runs import assert_same_bits, saved_tensors
from forge_testing.studies import LONG, SHORT, TRUNK, write_study
from forge_train import read_run

pytestmark = pytest.mark.lane("test")

ROOT = Path(__file__).parents[2]
_PAUSES = '[base.callbacks.pause]\nname = "tests.slurm.pause:Pause"\nevery_steps = {}\n'
_SLURM = "[base.resilience]\nsave_limit_seconds = 20\n[base.slurm]\ncpus_per_task = 1\n"


@pytest.mark.slow
@pytest.mark.distributed
def test_preempted_elements_end_with_the_bits_of_an_undisturbed_sweep(
    slurm: Any, tmp_path: Path
) -> None:
    """The trunk is preempted while forks wait for it; then a fork is."""
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    undisturbed = write_study(tmp_path / "here", base=_PAUSES.format(10**6))
    assert forge_train("sweep", undisturbed, "--jobs", "2", cwd=ROOT).code == 0
    path = write_study(tmp_path / "there", base=_PAUSES.format(1) + _SLURM)
    done = forge_train("sweep", path, "--slurm", "--submit", cwd=ROOT, **slurm.environ)
    assert done.code == 0, done.err
    runs = tmp_path / "there/out/runs"
    for run, step in ((TRUNK, 20), (LONG, 1)):
        wait_until(lambda: last_step(runs / run / "metrics.jsonl") >= step, 180)  # noqa: B023
        assert run == LONG or not (runs / LONG).joinpath("metrics.jsonl").exists()
        high = slurm.preempt()
        slurm.wait_for(high, "RUNNING")
        slurm.cancel(high)
    wait_until(lambda: not slurm.run("squeue", "--noheader"), 300, every=0.3)
    for run in read_study(path).runs:
        assert run.is_done(), slurm_log(tmp_path / "there/out/slurm")
        theirs = tmp_path / "here/out/runs" / run.name
        assert_same_bits(saved_tensors(run.dir), saved_tensors(theirs))
        begun = [e for e in read_run(run.dir).events if e["event"] in ("start", "resume")]
        assert run.name == SHORT or len(begun) > 1
    assert forge_train("sweep", path, cwd=ROOT).code == 0
    pages = [(tmp_path / name / "out/study.md").read_text() for name in ("here", "there")]
    assert pages[0].partition("Cost:")[0] == pages[1].partition("Cost:")[0]


def slurm_log(folder: Path) -> str:
    return "".join(path.read_text() for path in sorted(folder.glob("*/job-*.out")))
