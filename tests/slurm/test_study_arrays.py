"""The arrays that `forge-train sweep` and `grid` write, on a real Slurm: preempted elements end with the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.slurm.cluster import wait_until

from forge_lab import read_study
from forge_testing import forge_train, write_job
from forge_testing.processes import last_step
from forge_testing.runs import assert_same_bits, saved_tensors
from forge_testing.studies import LONG, SHORT, TRUNK, write_study
from forge_train import read_run

pytestmark = pytest.mark.lane("test")

ROOT = Path(__file__).parents[2]
_PAUSES = '[callbacks.pause]\nname = "tests.slurm.pause:Pause"\nevery_steps = {}\n'
_SLURM = "[resilience]\nsave_limit_seconds = 20\n[slurm]\ncpus_per_task = 1\n"


@pytest.mark.slow
@pytest.mark.distributed
def test_preempted_elements_end_with_the_bits_of_an_undisturbed_sweep(
    slurm: Any, tmp_path: Path
) -> None:
    """The trunk is preempted while forks wait for it; then a fork is."""
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    undisturbed = write_study(tmp_path / "here", base=_of_base(_PAUSES.format(10**6)))
    assert forge_train("sweep", undisturbed, "--jobs", "2", cwd=ROOT).code == 0
    path = write_study(tmp_path / "there", base=_of_base(_PAUSES.format(1) + _SLURM))
    done = forge_train("sweep", path, "--slurm", "--submit", cwd=ROOT, **slurm.environ)
    assert done.code == 0, done.err
    runs = tmp_path / "there/out/runs"
    for run, step in ((TRUNK, 20), (LONG, 1)):
        wait_until(lambda: last_step(runs / run / "metrics.jsonl") >= step, 180)  # noqa: B023
        assert run == LONG or not (runs / LONG).joinpath("metrics.jsonl").exists()
        preempt(slurm)
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


@pytest.mark.slow
@pytest.mark.distributed
def test_a_grid_whose_array_is_preempted_ends_like_one_of_this_machine(
    slurm: Any, tmp_path: Path
) -> None:
    rates, jobs = ("1e-3", "1e-2"), {}
    for name, pauses in (("here", 10**6), ("there", 1)):
        (tmp_path / name).mkdir()
        jobs[name] = write_job(tmp_path / name, _PAUSES.format(pauses) + _SLURM)

    def grid(name: str, *flags: str, **environ: str) -> None:
        over, out = "--over=optimizer.lr=" + ",".join(rates), f"--dir={tmp_path / name / 'out'}"
        done = forge_train("grid", jobs[name], over, out, *flags, cwd=ROOT, **environ)
        assert done.code == 0, done.err

    grid("here")
    grid("there", "--slurm", "--submit", **slurm.environ)
    runs = tmp_path / "there/out/runs"
    wait_until(lambda: all(last_step(runs / f"lr={r}/metrics.jsonl") >= 2 for r in rates), 180)
    preempt(slurm)
    wait_until(lambda: not slurm.run("squeue", "--noheader"), 300, every=0.3)

    grid("there")  # trains nothing: the table and the page of what the array has trained
    rows = json.loads((tmp_path / "there/out/grid.json").read_text())
    assert [row["status"] for row in rows] == ["done", "done"], slurm_log(tmp_path / "there/out")
    assert not (tmp_path / "there/out/lives.jsonl").exists()
    for rate in rates:
        run = runs / f"lr={rate}"
        assert "resume" in [event["event"] for event in read_run(run).events]
        assert_same_bits(saved_tensors(run), saved_tensors(tmp_path / f"here/out/runs/lr={rate}"))


def _of_base(tables: str) -> str:
    """The tables of a job, as those of the base of a study."""
    return tables.replace("[", "[base.")


def preempt(slurm: Any) -> None:
    high = slurm.preempt()
    slurm.wait_for(high, "RUNNING")
    slurm.cancel(high)


def slurm_log(folder: Path) -> str:
    return "".join(path.read_text() for path in sorted(folder.glob("*/job-*.out")))
